"""Draws the reward curve as a PNG and writes a self-contained HTML report. Untrusted text is escaped."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tentalis.demo.stats import VersionScore
from tentalis.demo.summary import AnswerPair, Summary

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1b; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top }
tr { border-bottom: 1px solid #ddd } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto } img { max-width: 100% }
.answer { white-space: pre-wrap }
"""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The contents of the report. `facts` and `versions` are name -> value."""

    summary: Summary
    answers: tuple[AnswerPair, ...]
    newest: str
    facts: Mapping[str, str]
    config: str
    versions: Mapping[str, str]
    commands: Sequence[str]


def draw_curve(scores: Sequence[VersionScore], path: Path) -> None:
    """Draws the mean reward by version with its standard error, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    versions = [score.version for score in scores]
    errors = [score.stderr or 0.0 for score in scores]
    axes.errorbar(versions, [score.mean for score in scores], yerr=errors, marker="o", capsize=3, color="#0b6e99")
    axes.set_xlabel("policy version")
    axes.set_ylabel("mean reward")
    axes.set_xticks(versions)
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def write_report(folder: Path, report: DemoReport) -> Path:
    """Writes `reward.png` and `report.html` into a folder and returns the latter's path."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_curve(report.summary.scores, folder / "reward.png")
    page = folder / "report.html"
    page.write_text(html_of(report, (folder / "reward.png").read_bytes()), encoding="utf-8")
    return page


def html_of(report: DemoReport, png: bytes) -> str:
    """Returns the HTML of the page."""
    summary = report.summary
    title = f"Run {escape(summary.run_id)}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>',
        f"<h1>{title}</h1>",
        _table(("what", "value"), report.facts.items()),
        "<h2>Reward by policy version</h2>",
        f'<img alt="mean reward by policy version" src="data:image/png;base64,{base64.b64encode(png).decode()}">',
        _table(SCORE_COLUMNS, (score_row(score) for score in summary.scores), numbers=True),
        "<p>The standard error is over the means of the tasks: samples of one task are not independent.</p>",
        f"<p>{escape(comparison(summary))}</p>",
        "<h2>The same questions before and after</h2>",
        _answers(report),
        "<h2>Try next</h2>",
        f"<pre>{escape(chr(10).join(report.commands))}</pre>",
        "<h2>Configuration of the run</h2>",
        f"<pre>{escape(report.config)}</pre>",
        "<h2>Versions</h2>",
        _table(("what", "version"), report.versions.items()),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


SCORE_COLUMNS = ("version", "mean reward", "± stderr", "samples", "mean words", "on topic")


def score_row(score: VersionScore) -> tuple[str, ...]:
    """Returns the row of a version under SCORE_COLUMNS."""
    return (
        str(score.version),
        f"{score.mean:.3f}",
        "" if score.stderr is None else f"{score.stderr:.3f}",
        str(score.n),
        "" if score.mean_words is None else f"{score.mean_words:.1f}",
        "" if score.on_topic_share is None else f"{score.on_topic_share:.0%}",
    )


def comparison(summary: Summary) -> str:
    """Returns the comparison of the first and the last quarter as a sentence."""
    first, last = summary.first, summary.last
    if first is None or last is None:
        return "Too few versions for a comparison."
    text = (
        f"First quarter of versions ({_span(first.versions)}): {first.mean:.3f} over {first.n} samples of "
        f"{first.tasks} tasks; last quarter ({_span(last.versions)}): {last.mean:.3f} over {last.n} samples of "
        f"{last.tasks} tasks."
    )
    if summary.p_value is None:
        return text
    return f"{text} One-sided permutation test on the tasks' means: p = {summary.p_value:.2g}."


def _span(versions: Sequence[int]) -> str:
    return f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]} to v{versions[-1]}"


def _answers(report: DemoReport) -> str:
    if not report.answers:
        return "<p>The model server did not answer.</p>"
    rows = ((a.question, a.base, a.newest) for a in report.answers)
    return _table(("question", "base model", report.newest), rows, css="answer")


def _table(head: Sequence[str], rows: Iterable[Iterable[str]], *, numbers: bool = False, css: str | None = None) -> str:
    kind = "number" if numbers else css
    attribute = f' class="{kind}"' if kind else ""
    lines = ["<table><tr>" + "".join(f"<th{attribute}>{escape(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td{attribute}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])
