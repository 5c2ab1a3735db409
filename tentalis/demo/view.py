"""Progress of the demo: a live view for a terminal, or plain lines without one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from schemas.topics import PREFIX
from tentalis.demo.stats import RunStats, VersionScore

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"
_SHOWN_VERSIONS = 16
# Terminal size for three panels side by side and a table of sixteen versions.
FULL_WIDTH, FULL_HEIGHT = 150, 24
_STATES = {
    "ready": "green",
    "running": "green",
    "done": "green",
    "failed": "red",
    "halted": "red",
    "crash-looping": "red",
    "unresponsive": "red",
    "degraded": "yellow",
    "recovering": "cyan",
    "starting": "cyan",
    "waiting": "dim",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The data of one view. `processes` comes from Supervisor.status(), `elapsed` is in seconds, `command` continues
    the run."""

    stats: RunStats
    steps: int
    processes: Mapping[str, Mapping[str, Any]]
    lags: Mapping[str, int]
    elapsed: float
    command: str = "tentalis demo"

    @property
    def hint(self) -> str:
        """The line on how to stop and continue."""
        return f"Ctrl-C stops everything; the next `{self.command}` continues from here."


def bar(value: float) -> str:
    """Returns a reward as a block of one of eight heights; rewards below 0 have the lowest."""
    return BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))]


def sparkline(scores: Sequence[VersionScore]) -> str:
    """Returns one block per version."""
    return "".join(bar(score.mean) for score in scores)


def served_step(stats: RunStats) -> int:
    """Returns the number of trained steps that are served."""
    if stats.acknowledged is None or stats.first_version is None:
        return 0
    return stats.step_of(stats.acknowledged) or 0


def clock(seconds: float) -> str:
    """Formats seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def time_left(now: Snapshot) -> str:
    """Returns the time that the other steps will take, in words; empty while it is not known."""
    seconds, left = now.stats.seconds_per_step(), now.steps - served_step(now.stats)
    return f"about {clock(seconds * left)} left" if seconds is not None and left > 0 else ""


def plain_line(now: Snapshot) -> str:
    """Returns the progress as one line of text."""
    stats = now.stats
    scores = stats.scores()
    latest = f"reward v{scores[-1].version} {scores[-1].mean:.2f} {sparkline(scores)}" if scores else "no reward yet"
    kinds = " ".join(f"{kind} {count}" for kind, count in sorted(stats.outcomes.items())) or "none"
    states = {name: str(status["state"]) for name, status in now.processes.items()}
    left = time_left(now)
    waiting = [f"{name} {state}" for name, state in states.items() if state not in _GOOD]
    return (
        f"[{clock(now.elapsed)}] step {served_step(stats)}/{now.steps} · tasks {stats.tasks} · outcomes: {kinds} · "
        f"{latest} · {stats.tokens_per_second():.0f} tok/s"
        + (f" · {left}" if left else "")
        + (f" · {', '.join(waiting)}" if waiting else "")
    )


_GOOD = ("ready", "running", "done")


def live_view(now: Snapshot, width: int, height: int) -> "RenderableType":
    """Returns the view for rich.live; a smaller one below FULL_WIDTH columns or FULL_HEIGHT lines."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    if width < FULL_WIDTH or height < FULL_HEIGHT:
        return _small_view(now)
    stats = now.stats
    head = Text.assemble(
        (f" {stats.run_id} ", "bold"),
        f" step {served_step(stats)} of {now.steps} served · {clock(now.elapsed)} · {_before(time_left(now), ' · ')}",
        f"{stats.tasks} tasks, {stats.results} results, {stats.feedback} feedback ({stats.complaints} complaints) · ",
        f"{stats.tokens_per_second():.0f} tokens/s ({stats.tokens:,} in all)",
    )
    side = Group(_outcomes(stats), _adapters(stats), _phases(stats))
    return Group(
        head,
        Columns([Panel(_rewards(stats), title="reward by version"), Panel(side), Panel(_processes(now))]),
        Text(now.hint, style="dim"),
    )


def _before(text: str, end: str) -> str:
    return f"{text}{end}" if text else ""


def _small_view(now: Snapshot) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    stats = now.stats
    scores = stats.scores()
    latest = f"{sparkline(scores)} v{scores[-1].version} {scores[-1].mean:.2f}" if scores else "none yet"
    processes = Text("processes: ")
    for name, status in now.processes.items():
        state = str(status["state"])
        restarts = f" ({status['restarts']})" if status["restarts"] else ""
        processes.append(f"{name} {state}{restarts}  ", style=_STATES.get(state, ""))
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(stats.outcomes.items())) or "none yet"
    behind = ", ".join(f"{name} {lag}" for name, lag in _behind(now).items() if lag) or "none"
    adapters = ", ".join(f"{name} {version}" for name, version in _versions(stats).items())
    return Group(
        Text(
            f"{stats.run_id}  step {served_step(stats)} of {now.steps} served  {clock(now.elapsed)}  {time_left(now)}",
            style="bold",
        ),
        Text(f"reward: {latest}"),
        Text(
            f"tasks {stats.tasks}, results {stats.results}, {stats.tokens_per_second():.0f} tokens/s; outcomes: {kinds}"
        ),
        Text(f"adapter: {adapters}; behind: {behind}"),
        processes,
        Text(now.hint, style="dim"),
    )


def _rewards(stats: RunStats) -> "Table":
    table = _grid("version", "reward", "", "words", "on topic")
    for score in stats.scores()[-_SHOWN_VERSIONS:]:
        width = round(20 * min(1.0, max(0.0, score.mean)))
        table.add_row(
            f"v{score.version}",
            f"{score.mean:.2f}" + ("" if score.stderr is None else f" ± {score.stderr:.2f}"),
            "█" * width + "·" * (20 - width),
            "" if score.mean_words is None else f"{score.mean_words:.0f}",
            "" if score.on_topic_share is None else f"{score.on_topic_share:.0%}",
        )
    return table


def _outcomes(stats: RunStats) -> "Table":
    table = _grid("outcome", "samples")
    for kind, count in sorted(stats.outcomes.items()):
        table.add_row(kind, str(count))
    table.add_row("open", str(max(0, stats.samples - sum(stats.outcomes.values()))))
    return table


def _adapters(stats: RunStats) -> "Table":
    table = _grid("adapter", "version")
    for name, version in _versions(stats).items():
        table.add_row(name, version)
    return table


def _versions(stats: RunStats) -> dict[str, str]:
    seen = {"published": stats.published, "promoted": stats.promoted, "acknowledged": stats.acknowledged}
    return {name: "-" if version is None else f"v{version}" for name, version in seen.items()}


def _behind(now: Snapshot) -> dict[str, int]:
    """Returns the lag in records by process."""
    return {name.removeprefix(f"{PREFIX}-").split("-")[0]: lag for name, lag in now.lags.items()}


def _phases(stats: RunStats) -> "Table":
    table = _grid("phase", "median s")
    for name, seconds in stats.seconds_by_phase().items():
        table.add_row(name, f"{seconds:.1f}")
    return table


def _processes(now: Snapshot) -> "Table":
    from rich.text import Text

    table = _grid("process", "state", "restarts", "behind")
    behind = _behind(now)
    for name, status in now.processes.items():
        state = str(status["state"])
        lag = behind.get(name)
        table.add_row(
            name,
            Text(state, style=_STATES.get(state, "")),
            str(status["restarts"] or ""),
            "" if lag is None else str(lag),
        )
    return table


def _grid(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
