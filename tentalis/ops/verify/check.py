"""The verdict: every rule over one log. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from schemas.records import Outcome, OutcomeKind, Record
from tentalis.ops.verify import rollouts, samples, training
from tentalis.ops.verify.index import Index
from tentalis.ops.verify.model import Log, LoggedRecord, ProblemKind, VerifyProblem, VerifyReport
from tentalis.ops.verify.training import TrainedRuns


def check(log: Log, *, allow_open: bool = False) -> VerifyReport:
    """Checks a log by every rule. With `allow_open`, tasks that are still open are counted, but are not problems.

    Counts are of distinct records by identity. `repeats` are further copies of the same key or id; at-least-once
    delivery makes them, and they are harmless if they are equal. Undecodable records on a compacted topic are listed as
    `unreadable`, but are not problems of the run, because their dead letters may have expired. `given_up` are samples
    and `rollouts_given_up` rollouts that were lost with a topic, if an operator accepted the loss.
    """
    index, trained = Index.of(log), TrainedRuns.of(log)
    problems = [problem for rule in (*samples.RULES, *rollouts.RULES) for problem in rule(index)]
    problems += [problem for rule in training.RULES for problem in rule(index, trained)]
    still_open = sum(problem.kind is ProblemKind.OPEN for problem in problems)
    if allow_open:
        problems = [problem for problem in problems if problem.kind is not ProblemKind.OPEN]
    kinds = Counter(_kind(copies[0].record) for copies in index.outcomes.values())
    of = trained.fates.of
    fates = Counter(of(first.record, first.partition, first.offset) for first, *_ in index.rollouts.values())
    by_identity: list[Mapping[str, Sequence[LoggedRecord[Record]]]] = [
        index.tasks,
        index.results,
        index.feedback,
        index.halves,
        index.outcomes,
        index.rollouts,
    ]
    numbers = {
        "tasks": len(index.tasks),
        "samples": sum(task.n_samples for task in index.live_tasks().values()),
        "results": len(index.results),
        "feedback": len(index.feedback),
        "halves": len(index.halves),
        "rollouts": len(index.rollouts),
        "superseded": kinds[OutcomeKind.SUPERSEDED.value],
        "late": kinds[OutcomeKind.LATE.value],
        "given_up": kinds["given_up"] + samples.given_up_with_halves(index),
        "rollouts_given_up": len(index.lost_rollouts),
        "steps": len(trained.winners.get(log.run, {})),
        "steps_under_way": len(trained.open_steps()),
        "trained": fates["trained"],
        "dropped": fates["dropped"],
        "ahead": fates["ahead"],
        "open_tasks": still_open,
        "dead_letters": len(log.dead),
        "repeats": sum(len(copies) - 1 for records in by_identity for copies in records.values()),
    }
    unreadable = [f"{place}: {why}" for place, why in log.unreadable]
    return VerifyReport(log.run, numbers, dict(sorted(kinds.items())), sorted(problems, key=_order), unreadable)


def _kind(outcome: Outcome) -> str:
    return "given_up" if outcome.given_up else outcome.kind.value


def _order(problem: VerifyProblem) -> tuple[str, str]:
    return problem.rule, problem.where
