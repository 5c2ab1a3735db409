"""Rules about samples: each has its outcome, and each result, feedback and half is accounted for."""

from collections.abc import Iterator

from schemas.records import Feedback, Opens, Outcome, OutcomeKind, Record, Source, Task
from tentalis.ops.verify.index import Half, Index, Slot, answers_terms, half_id, says_something
from tentalis.ops.verify.model import LoggedRecord, ProblemKind, VerifyProblem

SIDE_KINDS = {OutcomeKind.SUPERSEDED: "superseded", OutcomeKind.LATE: "late"}


def tasks_are_written_once(index: Index) -> Iterator[VerifyProblem]:
    """All copies of a task_id are the same task."""
    for task_id, copies in index.tasks.items():
        for copy in copies[1:]:
            if copy.record.model_copy(update={"event_time": copies[0].record.event_time}) != copies[0].record:
                yield VerifyProblem(
                    ProblemKind.WRONG,
                    "task-rewritten",
                    task_id,
                    f"{copies[0]} and {copy} are different tasks with one id",
                )


def tasks_are_alive(index: Index) -> Iterator[VerifyProblem]:
    """No task is a dead letter: it has no outcome, and none is due."""
    for task_id, copies in index.tasks.items():
        if index.dead(copies):
            yield VerifyProblem(
                ProblemKind.DEAD,
                "dead-task",
                task_id,
                f"{copies[0]} is a dead letter; `tentalis dlq show '{copies[0]}'` gives the reason, `tentalis dlq "
                "replay` sends it again",
            )


def tasks_open(index: Index) -> Iterator[VerifyProblem]:
    """Every task that opens immediately has its Open on the halves log, unless it was given up with that log."""
    for task_id, task in index.live_tasks().items():
        missing = task.terms.opens is Opens.AT_ONCE and task_id not in index.opens
        if missing and not index.halves_lost(task_id) and not _given_up(index, task):
            yield VerifyProblem(ProblemKind.LOST, "missing-open", task_id, "no Open on the halves log")


def _given_up(index: Index, task: Task) -> bool:
    outcomes = [index.main_outcome((task.task_id, sample)) for sample in range(task.n_samples)]
    return all(outcome is not None and outcome.given_up for outcome in outcomes)


def _awaits_feedback(index: Index, task: Task) -> bool:
    """Returns True if a task that opens with the first feedback has none yet, so that no outcome is due."""
    if task.terms.opens is not Opens.FIRST_FEEDBACK or task.task_id in index.opens:
        return False
    halves = [half for i in range(task.n_samples) for half in index.halves_of.get((task.task_id, i), ())]
    return not any(answers_terms(half.record) for half in halves)


def _without_outcome(index: Index, task: Task) -> list[int]:
    """Returns the samples of a task that have no outcome."""
    task_id, samples = task.task_id, range(task.n_samples)
    missing = [i for i in samples if index.main_outcome((task_id, i)) is None]
    if len(missing) == task.n_samples:  # the Open may have come too late, and then each sample has a `late` outcome
        opens = {item.record.open_id for item in index.opens.get(task_id, ())}
        missing = [i for i in samples if not any(f"{task_id}/{i}/late/{id_}" in index.outcomes for id_ in opens)]
    return missing


def _unknown(index: Index, task: Task) -> bool:
    """Returns True if the join cannot know a task: its halves were lost with their topic, and the loss was accepted."""
    return index.halves_lost(task.task_id) and index.has_no_half(task)


def given_up_with_halves(index: Index) -> int:
    """Returns the number of samples that were given up without an outcome: their halves were lost together with the
    state of the join."""
    outcomes = [copies[0].record for copies in index.outcomes.values()]
    too_late = {  # those of an Open that came too late
        (each.head.task_id, each.sample_index)
        for each in outcomes
        if each.kind is OutcomeKind.LATE and each.result_id is None
    }
    graded = {
        (seen.record.task_id, seen.record.source)
        for seen in index.log.feedback
        if index.losses.halves_lost(seen.partition, seen.timestamp)
    }
    count = 0
    for task_id, task in index.live_tasks().items():
        sources = (task.terms.rl, task.terms.opd)
        opened = task.terms.opens is Opens.AT_ONCE or any((task_id, source) in graded for source in sources)
        if opened and _unknown(index, task):
            count += sum((task_id, sample) not in too_late for sample in _without_outcome(index, task))
    return count


def samples_have_outcomes(index: Index) -> Iterator[VerifyProblem]:
    """Every sample of every task has its outcome, at the latest when the task's deadline has passed."""
    for task_id, task in index.live_tasks().items():
        missing = _without_outcome(index, task)
        if not missing or _unknown(index, task) or _awaits_feedback(index, task):
            continue
        seen = index.tasks[task_id][0]
        opened = min((item.record.opened_at for item in index.opens.get(task_id, ())), default=seen.timestamp)
        left_ms = opened + task.terms.deadline_ms - index.log.clock.get(seen.partition, 0)
        which = f"samples {', '.join(map(str, missing))} of {task.n_samples} have no outcome"
        if left_ms > 0:
            yield VerifyProblem(
                ProblemKind.OPEN,
                "open-task",
                task_id,
                f"{which}; the deadline is in {left_ms / 1000:.0f} s of log time",
            )
        else:
            yield VerifyProblem(ProblemKind.LOST, "missing-outcome", task_id, f"{which}, and the deadline has passed")


def outcomes_are_written_once(index: Index) -> Iterator[VerifyProblem]:
    """Repeats of an outcome are equal.

    Outcomes of late halves and superseded results may be repeated with another time, after the join has dropped the
    state of the task.
    """
    for key, copies in index.outcomes.items():
        for copy in copies[1:]:
            same_time = {"event_time": copies[0].record.event_time} if copy.record.kind in SIDE_KINDS else {}
            if copy.record.model_copy(update=same_time) != copies[0].record:
                first, other = copies[0].record, copy.record
                differing = [n for n in type(first).model_fields if getattr(first, n) != getattr(other, n)]
                yield VerifyProblem(
                    ProblemKind.DUPLICATE,
                    "outcome-rewritten",
                    key,
                    f"{copies[0]} and {copy} differ in {', '.join(differing)}",
                )
                break


def _halves_lost(index: Index, seen: LoggedRecord[Record]) -> bool:
    """Returns True if the halves that a record led to, or was made of, may be lost with their topic."""
    return index.losses.halves_lost(seen.partition, seen.timestamp)


def _key_of(outcome: Outcome) -> str:
    main = f"{outcome.head.task_id}/{outcome.sample_index}"
    if outcome.kind is OutcomeKind.SUPERSEDED:
        return f"{main}/superseded/{outcome.result_id}"
    return f"{main}/late/{outcome.half_id}" if outcome.kind is OutcomeKind.LATE else main


def outcomes_belong(index: Index) -> Iterator[VerifyProblem]:
    """An outcome's key matches its fields, and its sample, result and half exist."""
    tasks = index.live_tasks()
    for key, copies in index.outcomes.items():
        outcome = copies[0].record
        slot = (outcome.head.task_id, outcome.sample_index)
        task = tasks.get(outcome.head.task_id)

        def stray(message: str, key: str = key) -> VerifyProblem:
            return VerifyProblem(ProblemKind.WRONG, "stray-outcome", key, message)

        if task is None or outcome.sample_index >= task.n_samples:
            yield stray("no such sample: the task is not on the log or has fewer samples")
            continue
        if key != _key_of(outcome):
            yield stray(f"by its fields its key must be {_key_of(outcome)}")
        if outcome.head != task.head:
            yield stray("its task head differs from that of the task on the log")
        if outcome.result_id is not None:
            results = index.results.get(outcome.result_id, ())
            if not any((r.record.task.task_id, r.record.sample_index) == slot for r in results):
                yield stray(f"its result {outcome.result_id} is not a result of this sample")
        if outcome.kind is OutcomeKind.SUPERSEDED:
            main = index.main_outcome(slot)
            if main is not None and main.result_id == outcome.result_id:
                yield stray("the sample is bound to the result that this outcome calls superseded")
        opens = {item.record.open_id for item in index.opens.get(slot[0], ())}
        missing = outcome.half_id not in index.halves and outcome.half_id not in opens
        if outcome.kind is OutcomeKind.LATE and missing and not _halves_lost(index, copies[0]):
            yield stray(f"no half {outcome.half_id} is on the log")


def _has_side_outcome(index: Index, slot: Slot, kind: OutcomeKind, identity: str) -> bool:
    return f"{slot[0]}/{slot[1]}/{SIDE_KINDS[kind]}/{identity}" in index.outcomes


def results_are_accounted_for(index: Index) -> Iterator[VerifyProblem]:
    """Every result is bound to its sample, or superseded, or its halves were late."""
    tasks = index.live_tasks()
    scored = {s.record.sample.result_id for s in index.log.scores if s.record.source is Source.RESULT}
    for result_id, copies in index.results.items():
        result = copies[0].record
        slot = (result.task.task_id, result.sample_index)
        task = tasks.get(slot[0])
        if index.dead(copies):
            continue
        if task is None:
            yield VerifyProblem(
                ProblemKind.WRONG, "stray-result", result_id, f"{copies[0]}: its task is not on the log"
            )
            continue
        halves = [
            half
            for half in index.halves_of.get(slot, ())
            if half.record.sample.result_id == result_id and half.place not in index.log.dead
        ]
        if task.terms.rl is Source.RESULT and result_id not in scored:
            if not _halves_lost(index, copies[0]):
                yield VerifyProblem(ProblemKind.LOST, "unscored-result", result_id, f"{copies[0]} has no score")
            continue
        main = index.main_outcome(slot)
        if main is None or main.given_up or not halves or index.forgotten(task):
            continue  # samples_have_outcomes reports the sample; a result without a half needs no outcome
        late = any(_has_side_outcome(index, slot, OutcomeKind.LATE, half_id(half.record)) for half in halves)
        superseded = _has_side_outcome(index, slot, OutcomeKind.SUPERSEDED, result_id)
        if main.result_id != result_id and not superseded and not late:
            yield VerifyProblem(
                ProblemKind.LOST,
                "result-unaccounted",
                result_id,
                f"{copies[0]}: sample {slot[0]}/{slot[1]} is bound to {main.result_id}, "
                "and no outcome of this result is superseded or late",
            )


def _spoken_of(index: Index, task: Task, seen: LoggedRecord[Feedback]) -> Iterator[str]:
    """Yields the ids of the results that a feedback is about, except dead-lettered ones.

    That is the result it carries, else the first result, within the horizon, of each sample that it is about.
    """
    feedback, dead = seen.record, index.log.dead
    if feedback.result is not None:
        yield feedback.result.result_id
        return
    for i in range(task.n_samples) if feedback.sample_index is None else [feedback.sample_index]:
        results = index.results_of.get((task.task_id, i), ())
        near = [r for r in results if abs(r.timestamp - seen.timestamp) <= index.log.feedback_horizon_ms]
        if near and near[0].place not in dead:
            yield near[0].record.result_id


def feedback_is_answered(index: Index) -> Iterator[VerifyProblem]:
    """Feedback from a source that the terms name becomes a score, or a hint, for each result that it is about."""
    tasks = index.live_tasks()
    scores = {(s.record.feedback_id, s.record.sample.result_id) for s in index.log.scores}
    hints = {(h.record.feedback_id, h.record.sample.result_id) for h in index.log.hints}
    for feedback_id, copies in index.feedback.items():
        feedback = copies[0].record
        task = tasks.get(feedback.task_id)
        if task is None:
            continue
        live = [copy for copy in copies if copy.place not in index.log.dead and not _halves_lost(index, copy)]
        owed = {result_id for copy in live for result_id in _spoken_of(index, task, copy)}
        for source, found, half in ((task.terms.rl, scores, "score"), (task.terms.opd, hints, "hint")):
            missing = sorted(result_id for result_id in owed if (feedback_id, result_id) not in found)
            if feedback.source is source and missing:
                of = ", ".join(missing)
                yield VerifyProblem(
                    ProblemKind.LOST, "feedback-unanswered", feedback_id, f"{copies[0]} led to no {half} of {of}"
                )


def _used(index: Index, slot: Slot, half: Half) -> bool:
    """Returns True if the sample's rollout or outcome used the half."""
    record = half.record
    main = index.main_outcome(slot)
    if main is None or main.result_id != record.sample.result_id:
        return False
    if not answers_terms(record):
        return False
    if main.rollout_id is None or main.rollout_id in index.lost_rollouts or not says_something(record):
        return True
    rollouts = index.rollouts.get(main.rollout_id, ())
    used = {half.half_id for rollout in rollouts for half in rollout.record.provenance}
    return half_id(record) in used or any(rollout.record.forgotten for rollout in rollouts)


def halves_are_accounted_for(index: Index) -> Iterator[VerifyProblem]:
    """Every half is in its sample's rollout or outcome, or has a separate outcome as late or superseded."""
    tasks = index.live_tasks()
    for identity, copies in index.halves.items():
        sample = copies[0].record.sample
        slot = (sample.head.task_id, sample.sample_index)
        if index.dead(copies):
            continue
        bound = index.results.get(sample.result_id, ())
        answers = [r.record for r in bound if (r.record.task.task_id, r.record.sample_index) == slot]
        if slot[0] not in tasks or not answers:
            yield VerifyProblem(
                ProblemKind.WRONG, "stray-half", identity, f"{copies[0]}: no such result {sample.result_id}"
            )
            continue
        if all(answer.response_digest != sample.response_digest for answer in answers):
            yield VerifyProblem(
                ProblemKind.WRONG, "half-mismatch", identity, f"{copies[0]} has other tokens than its result"
            )
        main = index.main_outcome(slot)
        if main is None or main.given_up or index.forgotten(tasks[slot[0]]):
            continue  # samples_have_outcomes reports the sample; or the half is given up, or erased, as a Forget asked
        superseded = main.result_id != sample.result_id and _has_side_outcome(
            index, slot, OutcomeKind.SUPERSEDED, sample.result_id
        )
        late = _has_side_outcome(index, slot, OutcomeKind.LATE, identity)
        if not superseded and not late and not any(_used(index, slot, copy) for copy in copies):
            yield VerifyProblem(
                ProblemKind.LOST,
                "half-unaccounted",
                identity,
                f"{copies[0]}: neither in the outcome or rollout of {slot[0]}/{slot[1]}, nor late, nor superseded",
            )


def bad_bytes_are_kept(index: Index) -> Iterator[VerifyProblem]:
    """Every undecodable record is on the dead-letter topic with unchanged bytes."""
    for place, reason in index.log.undecodable:
        if place not in index.log.dead:
            yield VerifyProblem(ProblemKind.LOST, "undecodable-lost", str(place), reason)


RULES = (
    tasks_are_written_once,
    tasks_are_alive,
    tasks_open,
    samples_have_outcomes,
    outcomes_are_written_once,
    outcomes_belong,
    results_are_accounted_for,
    feedback_is_answered,
    halves_are_accounted_for,
    bad_bytes_are_kept,
)
