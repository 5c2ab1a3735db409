"""The report on a counterfactual run and its parent: in the terminal, as one JSON object, as one self-contained HTML
file.

The files report.json and report.html are always written to the counterfactual's folder.
"""

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tentalis.service import stdout
from trainer.replay.counterfactual import CounterfactualPair, RescoringReport, RunComparison

SHOWN_METRICS = ("reward_mean", "rl_loss", "opd_loss", "grad_norm", "entropy", "mismatch_kl", "rl_clip_fraction")


def comparison_json(comparison: RunComparison) -> dict[str, Any]:
    """Returns the whole comparison as JSON values."""
    return {
        "run_id": comparison.run_id,
        "parent_run": comparison.parent_run,
        "parent_step": comparison.parent_step,
        "policy": comparison.policy,
        "folder": str(comparison.folder),
        "changes": {name: {"recorded": old, "changed": new} for name, (old, new) in comparison.changes.items()},
        "rescoring": None if comparison.rescoring is None else asdict(comparison.rescoring),
        "steps": [
            {
                "step": pair.step,
                "recorded": dict(pair.recorded),
                "changed": dict(pair.changed),
                "difference": differences(pair),
                "recorded_sha256": pair.recorded_sha,
                "changed_sha256": pair.changed_sha,
                "kl_to_recorded": pair.kl,
                "adapter_distance": pair.distance.absolute,
                "adapter_distance_relative": _finite_or_none(pair.distance.relative),
            }
            for pair in comparison.steps
        ],
    }


def differences(pair: CounterfactualPair) -> dict[str, float]:
    """Returns the changed value less the recorded one, of each metric that both runs have."""
    return {name: pair.changed[name] - value for name, value in pair.recorded.items() if name in pair.changed}


def rescoring_lines(report: RescoringReport) -> list[str]:
    """Returns the counts of a counterfactual with other rewards, in words."""
    lines = [
        f"{report.scored} rollouts of its groups have a score of {report.label}; {report.unknown} without a reward."
    ]
    for title, counts in (
        ("Left out of the plans under the new rewards", report.dropped),
        ("Never planned, because of the recorded rewards", report.never_planned),
    ):
        if counts:
            lines.append(f"{title}: " + ", ".join(f"{count} ({reason})" for reason, count in counts.items()))
    if report.unscored:
        lines.append(f"{len(report.unscored)} rewarded rollouts have no such score, and no reward here:")
        lines += [f"  {rollout_id}: {reason}" for rollout_id, reason in report.unscored.items()]
    return lines


def write_report(comparison: RunComparison, emit: Callable[[Any], None] | None) -> None:
    """Writes both files, and passes the report to `emit`, or prints it as a table if there is none."""
    data = comparison_json(comparison)
    comparison.folder.mkdir(parents=True, exist_ok=True)
    (comparison.folder / "report.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    page = comparison.folder / "report.html"
    page.write_text(html_page(comparison), encoding="utf-8")
    if emit is not None:
        emit(data)
        return
    _print_table(comparison)
    print(
        f"Curves: {page}",
        f"It is a separate run, which is never served. To replay it: tentalis replay {comparison.run_id}",
        sep="\n",
        file=stdout.data(),
    )


def _print_table(comparison: RunComparison) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stdout.data(), highlight=False, soft_wrap=True)
    console.print(
        f"What if? {comparison.parent_run} from step {comparison.parent_step} on, the same rollouts in the same order:",
        markup=False,
    )
    for name, (old, new) in comparison.changes.items():
        console.print(f"  {name}: {old} -> {new}", markup=False)
    for line in () if comparison.rescoring is None else rescoring_lines(comparison.rescoring):
        console.print(line, markup=False)
    # Three lines a step, so that the runs align and no line exceeds a narrow terminal.
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for column in ("reward", "RL loss", "OPD loss", "gradient", "KL", "distance"):
        table.add_column(column, no_wrap=True, justify="right")
    for pair in comparison.steps:
        relative = f" ({pair.distance.relative:.0%})" if math.isfinite(pair.distance.relative) else ""
        for name, metrics, extra in (
            ("recorded", pair.recorded, ("", "")),
            ("changed", pair.changed, (f"{pair.kl:.2e}", _number(pair.distance.absolute) + relative)),
            ("difference", differences(pair), ("", "")),
        ):
            losses = (_number(metrics.get(metric)) for metric in ("reward_mean", "rl_loss", "opd_loss", "grad_norm"))
            table.add_row(str(pair.step) if metrics is pair.recorded else "", name, *losses, *extra)
    console.print(table)
    console.print("KL: of the changed policy to the recorded one, nats per token; distance: between the adapters.")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#1c2530;background:#fff}
h1{font-size:1.5rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #dde3ea}
td:first-child,th:first-child{text-align:left}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(20rem,1fr));gap:1.2rem;margin:1.5rem 0}
figure{margin:0}figcaption{font-weight:600}svg{width:100%;height:auto;background:#f7f9fb}
.a{stroke:#6b7a8c;fill:none;stroke-width:2}.b{stroke:#c2410c;fill:none;stroke-width:2}text{font-size:11px;fill:#5b6775}
.ka{color:#6b7a8c;font-weight:600}.kb{color:#c2410c;font-weight:600}.scroll{overflow-x:auto}
@media (prefers-color-scheme:dark){body{background:#12181f;color:#e3e9f0}svg{background:#1a222b}
td,th{border-color:#2c3743}}
"""


def html_page(comparison: RunComparison) -> str:
    """Returns the report as one HTML file: no script, no external resources."""
    pairs = comparison.steps
    changes = "".join(
        f"<li><code>{html.escape(name)}</code>: {html.escape(str(old))} → <b>{html.escape(str(new))}</b></li>"
        for name, (old, new) in comparison.changes.items()
    )
    charts = [_metric_chart(name, pairs) for name in SHOWN_METRICS if any(name in pair.changed for pair in pairs)]
    charts.append(_chart("KL to the recorded policy (nats per token)", pairs, [("b", lambda pair: pair.kl)]))
    charts.append(_chart("adapter distance", pairs, [("b", lambda pair: pair.distance.absolute)]))
    names = [name for name in SHOWN_METRICS if any(name in pair.recorded for pair in pairs)]
    header = "".join(f"<th>{html.escape(name)}</th>" for name in ("step", *names, "KL", "distance"))
    rows = "".join(
        f"<tr><td>{pair.step}</td>"
        + "".join(
            f"<td><span class=ka>{_number(pair.recorded.get(name))}</span> "
            f"<span class=kb>{_number(pair.changed.get(name))}</span></td>"
            for name in names
        )
        + f"<td>{pair.kl:.2e}</td><td>{_number(pair.distance.absolute)}</td></tr>"
        for pair in pairs
    )
    title = html.escape(f"{comparison.parent_run}: what if?")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        f"<p>The same rollouts in the same order as <span class=ka>{html.escape(comparison.parent_run)}</span> from "
        f"step {comparison.parent_step} on, trained as <span class=kb>{html.escape(comparison.run_id)}</span> with:</p>"
        f"<ul>{changes}</ul>{_rescoring_html(comparison)}<div class=charts>{''.join(charts)}</div>"
        f"<div class=scroll><table><tr>{header}</tr>{rows}</table></div></html>\n"
    )


def _rescoring_html(comparison: RunComparison) -> str:
    lines = () if comparison.rescoring is None else rescoring_lines(comparison.rescoring)
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


PairValue = Callable[[CounterfactualPair], float | None]


def _metric_chart(name: str, pairs: Sequence[CounterfactualPair]) -> str:
    recorded: PairValue = lambda pair: pair.recorded.get(name)  # noqa: E731
    changed: PairValue = lambda pair: pair.changed.get(name)  # noqa: E731
    return _chart(name, pairs, [("a", recorded), ("b", changed)])


def _chart(title: str, pairs: Sequence[CounterfactualPair], lines: Sequence[tuple[str, PairValue]]) -> str:
    series = [
        (kind, [(pair.step, value) for pair in pairs if (value := value_of(pair)) is not None and math.isfinite(value)])
        for kind, value_of in lines
    ]
    values = [value for _, points in series for _, value in points]
    if not values:
        return ""
    low, high = min(values), max(values)
    span, steps = (high - low) or 1.0, (pairs[-1].step - pairs[0].step) or 1

    def coordinates(step: int, value: float) -> str:
        return f"{44 + 264 * (step - pairs[0].step) / steps:.1f},{150 - 130 * (value - low) / span:.1f}"

    polylines = "".join(
        f"<polyline class={kind} points='{' '.join(coordinates(*point) for point in points)}'/>"
        for kind, points in series
    )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox='0 0 320 172' role=img "
        f"aria-label='{html.escape(title)}'>{polylines}<text x=2 y=24>{low + span if high > low else high:.3g}</text>"
        f"<text x=2 y=152>{low:.3g}</text><text x=44 y=168>step {pairs[0].step}</text>"
        f"<text x=308 y=168 text-anchor=end>{pairs[-1].step}</text></svg></figure>"
    )
