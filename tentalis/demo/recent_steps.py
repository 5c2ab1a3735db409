"""The phases of the last steps of every run in training, folded from the newest records of the loop. Pure.

The computation is that of a run's report (`RunStats`), over the last steps instead of all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.records import BatchPlan, Record, RunManifest
from tentalis.demo.stats import PHASES, RunStats
from tentalis.policies.lineage import Lineage

STEPS = 10
"""The steps of which the medians are."""
MOST_MS = 2 * 3_600_000
"""The longest time that is looked back. A run that neither began nor planned a step in it is not shown."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The phases of the last steps of a run.

    Attributes:
        run: the run, without the suffix of its branches after a rollback.
        policy: None if the log has no manifest of the run.
        step: the newest planned step; None before the first.
        steps: number of steps of which the medians are.
        seconds_by_phase: median seconds of each of PHASES; None for a phase that none of the steps has.
    """

    run: str
    policy: str | None
    step: int | None
    steps: int
    seconds_by_phase: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The part of the log that has the last steps. `since`: ms since the epoch; `runs`: those that began in it or
    planned a step in it."""

    since: int
    runs: tuple[str, ...]


def window_of(manifests: Iterable[RunManifest], plans: Iterable[tuple[BatchPlan, int]], now: int) -> StepWindow:
    """Returns the window of the last STEPS steps of each run, at most MOST_MS before `now` (ms since the epoch).

    The tasks of a step are issued after the plan of the step before it, and those of the first step after the manifest.

    Args:
        plans: the newest plans with their times on the log, in log order.
    """
    horizon = now - MOST_MS
    begun: dict[str, int] = {}
    for manifest in manifests:
        begun[manifest.run_id] = min(manifest.event_time, begun.get(manifest.run_id, manifest.event_time))
    planned: dict[str, list[tuple[int, int]]] = {}
    for plan, at in plans:
        if at >= horizon:
            planned.setdefault(plan.run_id, []).append((plan.step, at))
    since = {run: at for run, at in begun.items() if at >= horizon}
    for run, each in planned.items():
        step, at = each[-STEPS - 1 :][0]
        if step > 1 or run not in since:
            since[run] = at
    return StepWindow(min(since.values(), default=now), tuple(since))


class RecentSteps:
    """The fold over the records of a window and those that follow. Records may come twice, and topics in any order.

    Args:
        manifests: all manifests on the log.
    """

    def __init__(self, manifests: Iterable[RunManifest], window: StepWindow) -> None:
        self._manifests = list(manifests)
        self._since = window.since
        self._runs: dict[str, RunStats] = {}
        for run in window.runs:
            self._follow(run)

    def apply(self, record: Record, timestamp: int) -> None:
        """Applies a record with its time on the log, in ms. A run that begins or continues is shown from then on."""
        if isinstance(record, RunManifest):
            self._manifests.append(record)
        if isinstance(record, RunManifest | BatchPlan):
            self._follow(record.run_id)
        for stats in self._runs.values():
            stats.apply(record, timestamp)

    def rows(self) -> list[StepTimes]:
        """Returns the times of each run, in the order of their beginning in the window."""
        return [_row(stats, stats.whole_steps(self._since)[-STEPS:]) for stats in self._runs.values()]

    def _follow(self, run: str) -> None:
        policy = next((each.policy for each in self._manifests if each.run_id == run), None)
        stem = Lineage(each for each in self._manifests if each.policy == policy).stem(run) or run
        if stem in self._runs:
            return
        stats = self._runs[stem] = RunStats(stem)
        for manifest in self._manifests:
            stats.apply(manifest, manifest.event_time)


def _row(stats: RunStats, steps: Sequence[int]) -> StepTimes:
    found = stats.seconds_by_phase(steps)
    planned = stats.planned_steps()
    return StepTimes(
        stats.run_id,
        stats.policy,
        planned[-1] if planned else None,
        len(steps),
        {name: found.get(name) for name in PHASES},
    )
