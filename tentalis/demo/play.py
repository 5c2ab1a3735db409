"""`tentalis demo`: begins or continues a run, starts the stack, shows the progress and writes the summary."""

import logging
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tentalis.agents.scenarios import Scenario, make_scenario
from tentalis.demo import answers as showcase
from tentalis.demo.report import SCORE_COLUMNS, DemoReport, comparison, score_row, write_report
from tentalis.demo.runs import Configured, Run, RunKind, open_run, unused_applications, whole_models
from tentalis.demo.stats import RunStats
from tentalis.demo.summary import AnswerPair, Summary, summarise
from tentalis.demo.watch import Interrupted, Processes, RunWatch
from tentalis.kafka.lag import Groups, groups_of
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.service.stdout import data

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger(__name__)

STOP_S = 8.0
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "faust-streaming", "confluent-kafka", "pydantic")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line."""

    scenario: str = "assistant"
    steps: int = 15
    policy_model: str | None = None
    keep: bool = False
    emit: Callable[[Any], None] | None = None
    ranks: int = 1
    changes: tuple[str, ...] = ()


def play(options: DemoOptions, settings: Settings, configured: Configured) -> int:
    """Plays the whole demo. Returns 0, or INTERRUPTED after Ctrl-C; raises RunFailed and what the stack raises."""
    from rich.console import Console

    from tentalis.local.shutdown import signals_unwind, stop_signals
    from tentalis.local.stack import StackOptions, build_stack
    from tentalis.local.state import StateDir
    from tentalis.local.supervisor import Supervisor

    console = Console(stderr=True, markup=False, highlight=False)
    log_to(console)
    scenario = make_scenario(options.scenario, settings.data)
    with signals_unwind(), StateDir(settings.home) as state:
        model = prepare_model(console, options, settings)
        kind = RunKind(options.scenario, options.steps, str(model), options.changes)
        run = open_run(state.folder("runs"), kind, scenario, time.time(), configured)
        console.print(
            f"{'continuing' if run.resumed else 'beginning'} run {run.run_id} in {state.path}", soft_wrap=True
        )
        stack = build_stack(
            StackOptions(
                state=state,
                settings=settings,
                model=model,
                trainer_config=run.config,
                environment=scenario.environment,
                manager=("--scenario", options.scenario, "--run", run.run_id),
                ranks=options.ranks,
                whole_models=whole_models(run.config),
                without=unused_applications(run.config),
            )
        )
        with stop_signals() as stop:
            supervisor = Supervisor(state, stack.specs)
            supervisor.start()
            try:
                groups = groups_of(scenario.environment, scenario.policy, supervisor.status().keys())
                show = Show(run, options, scenario, stack.settings, stack.server, supervisor, console, stop, groups)
                show.play()
            except Interrupted:
                console.print("stopping ...", soft_wrap=True)
            finally:
                supervisor.stop(STOP_S)
            if not show.concluded:
                command = " ".join(["tentalis demo", *_flags(options)])
                console.print(f"stopped. `{command}` continues run {run.run_id}", soft_wrap=True)
                return ExitCode.INTERRUPTED
    return ExitCode.OK


def prepare_model(console: "Console", options: DemoOptions, settings: Settings) -> Any:
    """Fetches the broker and the model; see tentalis.demo.prepare."""
    from tentalis.demo.prepare import prepare

    return prepare(console, options.policy_model, settings.cache, own_broker=settings.bootstrap is None)


@dataclass
class Show:
    """Watches one run of the demo, then writes the summary."""

    run: Run
    options: DemoOptions
    scenario: Scenario
    settings: Settings
    server: str
    processes: Processes
    console: "Console"
    stop: threading.Event
    groups: Groups
    concluded: bool = False
    watch: RunWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = RunWatch(
            self.run.run_id,
            self.options.steps,
            self.scenario.environment,
            self.scenario.policy,
            self.settings,
            self.processes,
            self.console,
            self.stop,
            self.groups,
            "tentalis demo",
        )

    @property
    def stats(self) -> RunStats:
        """The statistics of the records so far."""
        return self.watch.stats

    def play(self) -> None:
        """Watches the run to its end and writes the summary. Raises Interrupted or RunFailed."""
        self.watch.follow()
        self._conclude()
        if self.options.keep:
            self.console.print("the stack keeps running; Ctrl-C stops it", soft_wrap=True)
            self.watch.stay()

    def _conclude(self) -> None:
        last = max(self.stats.metrics, default=0)
        summary = summarise(self.stats, last, self.watch.elapsed, self.watch.start_seconds)
        newest = f"{self.stats.policy}@v{self.stats.acknowledged}"
        said = self._answers(newest)
        report = DemoReport(
            summary=summary,
            answers=said,
            newest=newest,
            facts=self._facts(summary),
            config=self.stats.config or self.run.config.read_text(encoding="utf-8"),
            versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
            commands=next_commands(self.run.run_id, self.stats.newest_branch, stays=self.options.keep),
        )
        page = write_report(self.settings.home / "reports" / self.run.run_id, report)
        self.run.finish()
        self.concluded = True
        if self.options.emit is not None:
            self.options.emit(summary.as_json())
            self.console.print(f"report: {page}", soft_wrap=True)
        else:
            print_summary(summary, report, str(page))
        for name, reason in self.processes.broken().items():
            self.console.print(f"{name}: {reason}", soft_wrap=True)

    def _answers(self, newest: str) -> tuple[AnswerPair, ...]:
        from tentalis.inference.protocol import ServerUnavailable

        try:
            return showcase.compare_answers(self.server, newest, self.scenario, self.watch.check_stop)
        except ServerUnavailable as error:
            log.warning("no answers to compare: %s", error)
            return ()

    def _facts(self, summary: Summary) -> dict[str, str]:
        stats = self.stats
        facts = {
            "scenario": self.options.scenario,
            "steps": str(summary.steps),
            "adapters": f"{stats.policy}@v{stats.first_version} to v{stats.published}",
            "tasks": f"{stats.tasks} with {stats.samples} samples",
            "results": f"{stats.results}, {stats.failed_results} of them failed; {stats.tokens} response tokens",
            "outcomes": ", ".join(f"{kind} {count}" for kind, count in sorted(stats.outcomes.items())),
            "feedback": f"{stats.feedback}, {stats.complaints} of them complaints",
            "seconds": f"{summary.wall_seconds:.0f}" + (" since it was resumed" if self.run.resumed else ""),
        }
        facts |= summary.times()
        if stats.refused:
            facts["refused versions"] = "; ".join(f"v{number}: {why}" for number, why in stats.refused.items())
        if stats.rollbacks:
            facts["rollbacks"] = "; ".join(stats.rollbacks.values())
        if self.watch.skipped:
            facts["undecodable records skipped"] = str(self.watch.skipped)
        return facts


def next_commands(run_id: str, newest_branch: str, *, stays: bool) -> tuple[str, ...]:
    """Returns the commands to try after a run; `stays` says that its stack keeps running. `newest_branch`: the run that
    trained the newest version; after a rollback, a branch of the run. Tasks have the id of the run itself."""
    return (
        f"tentalis replay {newest_branch}",
        f"tentalis verify {run_id}",
        "tentalis status" if stays else "tentalis up",
    )


def printable(text: str) -> str:
    """Replaces unprintable characters of a model's answer, which could move the terminal's cursor."""
    return "".join(each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)


def print_summary(summary: Summary, report: DemoReport, page: str) -> None:
    """Prints the summary on stdout, for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=data(), markup=False, highlight=False)
    table = Table(*SCORE_COLUMNS, title=f"run {summary.run_id}")
    for score in summary.scores:
        table.add_row(*score_row(score))
    console.print(table)
    console.print(comparison(summary), soft_wrap=True)
    if report.answers:
        said = Table("question", "base model", report.newest, show_lines=True)
        for each in report.answers:
            said.add_row(*(Text(printable(text)) for text in (each.question, each.base, each.newest)))
        console.print(said)
    console.print(f"report: {page}", soft_wrap=True)
    console.print(f"run: {summary.run_id} ({summary.wall_seconds:.0f} s)", soft_wrap=True)
    console.print("try next:", *(f"  {command}" for command in report.commands), sep="\n", soft_wrap=True)


def _flags(options: DemoOptions) -> list[str]:
    default = DemoOptions()
    flags = []
    if options.scenario != default.scenario:
        flags += ["--scenario", options.scenario]
    if options.steps != default.steps:
        flags += ["--steps", str(options.steps)]
    if options.ranks != default.ranks:
        flags += ["--ranks", str(options.ranks)]
    if options.policy_model is not None:
        flags += ["--policy-model", options.policy_model]
    for change in options.changes:
        flags += ["--set", shlex.quote(change)]
    return flags


def log_to(console: "Console") -> None:
    """Sends warnings to stderr, on a terminal through the console of the live view, so that they do not disturb it."""
    from rich.logging import RichHandler

    handler = (
        RichHandler(console=console, show_path=False) if console.is_terminal else logging.StreamHandler(sys.stderr)
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s", force=True)
