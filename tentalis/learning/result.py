"""The result of a run: printed for people, as JSON for programs, and as an HTML report."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tentalis.agents.manager.curriculum import Pool
from tentalis.demo.play import PACKAGES, printable
from tentalis.demo.report import DemoReport, comparison, write_report
from tentalis.demo.stats import RunStats
from tentalis.demo.summary import AnswerPair, Summary, summarise
from tentalis.demo.view import sparkline
from tentalis.learning.compare import Comparison
from tentalis.learning.pools import pools_in_words
from tentalis.learning.sample import ScoredAnswer
from tentalis.service.stdout import data
from tentalis.storage.location import Location

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class SamplePair:
    """A held-out question with the greedy answers of the base model and the newest adapter."""

    question: str
    before: ScoredAnswer
    after: ScoredAnswer


@dataclass(frozen=True, slots=True)
class LearnResult:
    """Everything that is known at the end of a run. `problems`: reasons of unknown rewards in the comparison. `pools`:
    the number of prompts in each pool of the curriculum; None without one."""

    run_id: str
    stats: RunStats
    steps: int
    newest: str
    comparison: Comparison | None
    samples: Sequence[SamplePair]
    problems: Sequence[str]
    wall_seconds: float
    start_seconds: float | None
    resumed: bool
    prompts: str
    rewards: Sequence[str]
    config: str
    pools: Mapping[Pool, int] | None = None

    @property
    def summary(self) -> Summary:
        """The rewards of training by version, and its times."""
        return summarise(self.stats, max(self.stats.metrics, default=0), self.wall_seconds, self.start_seconds)

    @property
    def adapter(self) -> str:
        """The place of the newest adapter: a folder of this machine, or the URL of an object store."""
        location = Location.parse(self.stats.locations[int(self.newest.rpartition("@v")[2])])
        return location.url if location.folder is None else str(location.folder)

    @property
    def commands(self) -> tuple[str, ...]:
        """The next commands: replay, serve, export."""
        return (
            f"tentalis replay {self.run_id}",
            "tentalis up --gateway",
            f"tentalis policy export {self.newest} --format safetensors --to {self.newest.replace('@', '-')}",
        )

    def held_out_sentence(self) -> str:
        """Returns the comparison on held-out prompts in words."""
        if self.comparison is None:
            reason = f": {self.problems[0]}" if self.problems else ""
            return f"No held-out prompt has a known reward both before and after{reason}."
        reason = f" An unknown reward: {self.problems[0]}." if self.problems else ""
        return self.comparison.sentence() + reason

    def as_json(self, report: Path) -> dict[str, Any]:
        """Returns the object for `-o json`."""
        return self.summary.as_json() | {
            "held_out": None if self.comparison is None else self.comparison.as_json(),
            "samples": [
                {
                    "question": each.question,
                    "before": {"answer": each.before.text, "reward": each.before.reward},
                    "after": {"answer": each.after.text, "reward": each.after.reward},
                }
                for each in self.samples
            ],
            "policy": self.newest,
            "adapter": self.adapter,
            "pools": None if self.pools is None else {pool.value: count for pool, count in self.pools.items()},
            "report": str(report),
            "next": list(self.commands),
        }


def emit_result(result: LearnResult, folder: Path, emit: Callable[[Any], None] | None, console: "Console") -> None:
    """Writes the report into a folder, then prints the result for people, or emits it for programs."""
    page = write_report(folder, _report(result))
    if emit is not None:
        emit(result.as_json(page))
        console.print(f"report: {page}", soft_wrap=True)
    else:
        _print(result, page)


def _report(result: LearnResult) -> DemoReport:
    stats, summary = result.stats, result.summary
    facts = {
        "held-out prompts": result.held_out_sentence(),
        "prompts": result.prompts,
        "reward": ", ".join(result.rewards),
        **({} if result.pools is None else {"prompts by solve rate": pools_in_words(result.pools)}),
        "steps": str(summary.steps),
        "adapter": result.adapter,
        "tasks": f"{stats.tasks} with {stats.samples} samples",
        "results": f"{stats.results}, {stats.failed_results} of them failed; {stats.tokens} response tokens",
        "outcomes": ", ".join(f"{kind} {count}" for kind, count in sorted(stats.outcomes.items())),
        "seconds": f"{result.wall_seconds:.0f}" + (" since it was resumed" if result.resumed else ""),
        **summary.times(),
    }
    return DemoReport(
        summary=summary,
        answers=tuple(AnswerPair(each.question, shown(each.before), shown(each.after)) for each in result.samples),
        newest=result.newest,
        facts=facts,
        config=stats.config or result.config,
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        commands=result.commands,
    )


def shown(answer: ScoredAnswer) -> str:
    """Returns an answer with its reward, or with the reason why there is none."""
    reward = f"unknown: {answer.problem}" if answer.reward is None else f"{answer.reward:.3f}"
    return printable(f"{answer.text.strip()}\n[reward {reward}]")


def _print(result: LearnResult, page: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=data(), markup=False, highlight=False)
    summary = result.summary
    scores = summary.scores
    console.print(f"run {result.run_id}: {len(scores)} versions, reward {sparkline(scores)}", soft_wrap=True)
    console.print(comparison(summary), soft_wrap=True)
    console.print(result.held_out_sentence(), soft_wrap=True)
    table = Table("question", "base model", result.newest, show_lines=True)
    for each in result.samples:
        table.add_row(*(Text(text) for text in (printable(each.question), shown(each.before), shown(each.after))))
    console.print(table)
    if result.pools is not None:
        console.print(f"prompts by solve rate: {pools_in_words(result.pools)}", soft_wrap=True)
    for name, value in summary.times().items():
        console.print(f"{name}: {value}", soft_wrap=True)
    console.print(f"adapter: {result.adapter}", soft_wrap=True)
    console.print(f"report: {page}", soft_wrap=True)
    console.print("try next:", *(f"  {command}" for command in result.commands), sep="\n", soft_wrap=True)
