"""The verdict: every rule over one log. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from schemas.records import OutcomeKind, Record
from tentalis.verify import rollouts, samples, training
from tentalis.verify.index import Index
from tentalis.verify.model import Kind, Log, Problem, Report, Seen
from tentalis.verify.training import Training


def check(log: Log, *, allow_open: bool = False) -> Report:
    """What the run consists of and what is wrong with it. With `allow_open`, tasks still open are counted, no problem.

    Counts are of distinct records by their identity; `repeats` are further copies of the same key or id, which
    at-least-once delivery makes and which harm nobody as long as they say the same. What is no record on a topic that
    is compacted is listed, and is no problem of the run's: its dead letter may be long gone.
    """
    index, trained = Index.of(log), Training.of(log)
    problems = [problem for rule in (*samples.RULES, *rollouts.RULES) for problem in rule(index)]
    problems += [problem for rule in training.RULES for problem in rule(index, trained)]
    still_open = sum(problem.kind is Kind.OPEN for problem in problems)
    if allow_open:
        problems = [problem for problem in problems if problem.kind is not Kind.OPEN]
    kinds = Counter(copies[0].record.kind.value for copies in index.outcomes.values())
    of = trained.fates.of
    fates = Counter(of(first.record, first.partition, first.offset) for first, *_ in index.rollouts.values())
    by_identity: list[Mapping[str, Sequence[Seen[Record]]]] = [
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
    return Report(log.run, numbers, dict(sorted(kinds.items())), sorted(problems, key=_order), unreadable)


def _order(problem: Problem) -> tuple[str, str]:
    return problem.rule, problem.where
