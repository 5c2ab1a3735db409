"""Rules about samples: every one has its outcome, and every result, feedback and half is accounted for."""

from collections.abc import Iterator

from schemas.records import Feedback, Opens, Outcome, OutcomeKind, Source, Task
from tentalis.verify.index import Half, Index, Slot, answers_terms, half_id, says_something
from tentalis.verify.model import Kind, Problem, Seen

SIDE_KINDS = {OutcomeKind.SUPERSEDED: "superseded", OutcomeKind.LATE: "late"}


def tasks_are_written_once(index: Index) -> Iterator[Problem]:
    """A task_id names one task, whatever copies of it there are."""
    for task_id, copies in index.tasks.items():
        for copy in copies[1:]:
            if copy.record.model_copy(update={"event_time": copies[0].record.event_time}) != copies[0].record:
                yield Problem(
                    Kind.WRONG, "task-rewritten", task_id, f"{copies[0]} and {copy} are different tasks of one id"
                )


def tasks_open(index: Index) -> Iterator[Problem]:
    """Every task that opens at once has its Open on the halves log."""
    for task_id, task in index.live_tasks().items():
        if task.terms.opens is Opens.AT_ONCE and task_id not in index.opens:
            yield Problem(Kind.LOST, "missing-open", task_id, "no Open on the halves log")


def _awaits_feedback(index: Index, task: Task) -> bool:
    """Whether a task that opens with the first feedback has had none yet: nothing is owed."""
    if task.terms.opens is not Opens.FIRST_FEEDBACK or task.task_id in index.opens:
        return False
    halves = [half for i in range(task.n_samples) for half in index.halves_of.get((task.task_id, i), ())]
    return not any(answers_terms(half.record) for half in halves)


def samples_have_outcomes(index: Index) -> Iterator[Problem]:
    """Every sample of every task has its one outcome, at the latest when the task's deadline has passed."""
    for task_id, task in index.live_tasks().items():
        samples = range(task.n_samples)
        missing = [i for i in samples if index.main_outcome((task_id, i)) is None]
        if (
            len(missing) == task.n_samples
        ):  # perhaps it was announced too late to be opened at all, and each sample says so
            opens = {item.record.open_id for item in index.opens.get(task_id, ())}
            missing = [i for i in samples if not any(f"{task_id}/{i}/late/{id_}" in index.outcomes for id_ in opens)]
        if not missing or _awaits_feedback(index, task):
            continue
        seen = index.tasks[task_id][0]
        opened = min((item.record.opened_at for item in index.opens.get(task_id, ())), default=seen.timestamp)
        left_ms = opened + task.terms.deadline_ms - index.log.clock.get(seen.partition, 0)
        which = f"samples {', '.join(map(str, missing))} of {task.n_samples} have no outcome"
        if left_ms > 0:
            yield Problem(
                Kind.OPEN, "open-task", task_id, f"{which}; by the log's clock {left_ms / 1000:.0f} s are left"
            )
        else:
            yield Problem(Kind.LOST, "missing-outcome", task_id, f"{which}, and the deadline has passed")


def outcomes_are_written_once(index: Index) -> Iterator[Problem]:
    """Repeats of an outcome are equal.

    Those of late halves and superseded results may be written again, at another time, once the join has forgotten the
    task.
    """
    for key, copies in index.outcomes.items():
        for copy in copies[1:]:
            same_time = {"event_time": copies[0].record.event_time} if copy.record.kind in SIDE_KINDS else {}
            if copy.record.model_copy(update=same_time) != copies[0].record:
                first, other = copies[0].record, copy.record
                differing = [n for n in type(first).model_fields if getattr(first, n) != getattr(other, n)]
                yield Problem(
                    Kind.DUPLICATE, "outcome-rewritten", key, f"{copies[0]} and {copy} differ in {', '.join(differing)}"
                )
                break


def _key_of(outcome: Outcome) -> str:
    main = f"{outcome.head.task_id}/{outcome.sample_index}"
    if outcome.kind is OutcomeKind.SUPERSEDED:
        return f"{main}/superseded/{outcome.result_id}"
    return f"{main}/late/{outcome.half_id}" if outcome.kind is OutcomeKind.LATE else main


def outcomes_belong(index: Index) -> Iterator[Problem]:
    """An outcome's key says what its fields say, and speaks of a sample, result and half that exist."""
    tasks = index.live_tasks()
    for key, copies in index.outcomes.items():
        outcome = copies[0].record
        slot = (outcome.head.task_id, outcome.sample_index)
        task = tasks.get(outcome.head.task_id)

        def stray(message: str, key: str = key) -> Problem:
            return Problem(Kind.WRONG, "stray-outcome", key, message)

        if task is None or outcome.sample_index >= task.n_samples:
            yield stray("no such sample: the task is not on the log or has fewer samples")
            continue
        if key != _key_of(outcome):
            yield stray(f"its fields ask for the key {_key_of(outcome)}")
        if outcome.head != task.head:
            yield stray("it carries another task head than the task on the log")
        if outcome.result_id is not None:
            results = index.results.get(outcome.result_id, ())
            if not any((r.record.task.task_id, r.record.sample_index) == slot for r in results):
                yield stray(f"its result {outcome.result_id} is none of this sample's")
        if outcome.kind is OutcomeKind.SUPERSEDED:
            main = index.main_outcome(slot)
            if main is not None and main.result_id == outcome.result_id:
                yield stray("the superseded result is the one that the sample is bound to")
        opens = {item.record.open_id for item in index.opens.get(slot[0], ())}
        if outcome.kind is OutcomeKind.LATE and outcome.half_id not in index.halves and outcome.half_id not in opens:
            yield stray(f"no half {outcome.half_id} is on the log")


def _has_side_outcome(index: Index, slot: Slot, kind: OutcomeKind, identity: str) -> bool:
    return f"{slot[0]}/{slot[1]}/{SIDE_KINDS[kind]}/{identity}" in index.outcomes


def results_are_accounted_for(index: Index) -> Iterator[Problem]:
    """Every result is the bound one of its sample, or superseded, or its halves came late."""
    tasks = index.live_tasks()
    scored = {s.record.sample.result_id for s in index.log.scores if s.record.source is Source.RESULT}
    for result_id, copies in index.results.items():
        result = copies[0].record
        slot = (result.task.task_id, result.sample_index)
        task = tasks.get(slot[0])
        if index.dead(copies):
            continue
        if task is None:
            yield Problem(Kind.WRONG, "stray-result", result_id, f"{copies[0]} answers a task that is not on the log")
            continue
        halves = [
            half
            for half in index.halves_of.get(slot, ())
            if half.record.sample.result_id == result_id and half.place not in index.log.dead
        ]
        if task.terms.rl is Source.RESULT and result_id not in scored:
            yield Problem(Kind.LOST, "unscored-result", result_id, f"{copies[0]} has no score")
            continue
        main = index.main_outcome(slot)
        if main is None or not halves or index.forgotten(task):
            continue  # the sample itself is reported; a result on which no source has spoken owes nothing
        late = any(_has_side_outcome(index, slot, OutcomeKind.LATE, half_id(half.record)) for half in halves)
        superseded = _has_side_outcome(index, slot, OutcomeKind.SUPERSEDED, result_id)
        if main.result_id != result_id and not superseded and not late:
            yield Problem(
                Kind.LOST,
                "result-unaccounted",
                result_id,
                f"{copies[0]}: sample {slot[0]}/{slot[1]} is bound to {main.result_id}, "
                "and no outcome says superseded or late",
            )


def _spoken_of(index: Index, task: Task, seen: Seen[Feedback]) -> Iterator[str]:
    """The results that feedback speaks of: the one it carries, else the first of each sample that it is about, of those
    appended within the horizon. A result that was dead-lettered owes nothing."""
    feedback, dead = seen.record, index.log.dead
    if feedback.result is not None:
        yield feedback.result.result_id
        return
    for i in range(task.n_samples) if feedback.sample_index is None else [feedback.sample_index]:
        results = index.results_of.get((task.task_id, i), ())
        near = [r for r in results if abs(r.timestamp - seen.timestamp) <= index.log.feedback_horizon_ms]
        if near and near[0].place not in dead:
            yield near[0].record.result_id


def feedback_is_answered(index: Index) -> Iterator[Problem]:
    """Feedback from the source that the terms name becomes a score, or a hint, for each result that it speaks of."""
    tasks = index.live_tasks()
    scores = {(s.record.feedback_id, s.record.sample.result_id) for s in index.log.scores}
    hints = {(h.record.feedback_id, h.record.sample.result_id) for h in index.log.hints}
    for feedback_id, copies in index.feedback.items():
        feedback = copies[0].record
        task = tasks.get(feedback.task_id)
        if task is None:
            continue
        live = [copy for copy in copies if copy.place not in index.log.dead]
        owed = {result_id for copy in live for result_id in _spoken_of(index, task, copy)}
        for source, found, half in ((task.terms.rl, scores, "score"), (task.terms.opd, hints, "hint")):
            missing = sorted(result_id for result_id in owed if (feedback_id, result_id) not in found)
            if feedback.source is source and missing:
                of = ", ".join(missing)
                yield Problem(Kind.LOST, "feedback-unanswered", feedback_id, f"{copies[0]} led to no {half} of {of}")


def _used(index: Index, slot: Slot, half: Half) -> bool:
    """Whether the sample's own rollout or its own outcome took the half."""
    record = half.record
    main = index.main_outcome(slot)
    if main is None or main.result_id != record.sample.result_id:
        return False
    if not answers_terms(record):
        return False
    if main.rollout_id is None or not says_something(record):
        return True
    rollouts = index.rollouts.get(main.rollout_id, ())
    used = {half.half_id for rollout in rollouts for half in rollout.record.provenance}
    return half_id(record) in used or any(rollout.record.forgotten for rollout in rollouts)


def halves_are_accounted_for(index: Index) -> Iterator[Problem]:
    """Every half is in its sample's rollout or outcome, or has an outcome of its own as late or superseded."""
    tasks = index.live_tasks()
    for identity, copies in index.halves.items():
        sample = copies[0].record.sample
        slot = (sample.head.task_id, sample.sample_index)
        if index.dead(copies):
            continue
        bound = index.results.get(sample.result_id, ())
        answers = [r.record for r in bound if (r.record.task.task_id, r.record.sample_index) == slot]
        if slot[0] not in tasks or not answers:
            yield Problem(Kind.WRONG, "stray-half", identity, f"{copies[0]}: no such result {sample.result_id}")
            continue
        if all(answer.response_digest != sample.response_digest for answer in answers):
            yield Problem(Kind.WRONG, "half-mismatch", identity, f"{copies[0]} speaks of other tokens than its result")
        main = index.main_outcome(slot)
        if main is None or index.forgotten(tasks[slot[0]]):
            continue  # reported as open or lost with its sample; or gone, as it was asked to be
        superseded = main.result_id != sample.result_id and _has_side_outcome(
            index, slot, OutcomeKind.SUPERSEDED, sample.result_id
        )
        late = _has_side_outcome(index, slot, OutcomeKind.LATE, identity)
        if not superseded and not late and not any(_used(index, slot, copy) for copy in copies):
            yield Problem(
                Kind.LOST,
                "half-unaccounted",
                identity,
                f"{copies[0]}: neither in the outcome or rollout of {slot[0]}/{slot[1]}, nor late, nor superseded",
            )


def bad_bytes_are_kept(index: Index) -> Iterator[Problem]:
    """What cannot be decoded lies in the dead-letter topic, bytes unchanged."""
    for place, reason in index.log.undecodable:
        if place not in index.log.dead:
            yield Problem(Kind.LOST, "undecodable-lost", str(place), reason)


RULES = (
    tasks_are_written_once,
    tasks_open,
    samples_have_outcomes,
    outcomes_are_written_once,
    outcomes_belong,
    results_are_accounted_for,
    feedback_is_answered,
    halves_are_accounted_for,
    bad_bytes_are_kept,
)
