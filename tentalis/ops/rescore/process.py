"""Reads the results of a run, scores them and writes the scores."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from schemas import topics
from schemas.records import BatchPlan, Result
from schemas.wire.codec import Codec
from tentalis.kafka.codec import make_codec
from tentalis.kafka.producer import Publisher
from tentalis.kafka.reader import records_to_end
from tentalis.ops.rescore.core import (
    NothingToScore,
    RescoredRow,
    ScoredAnswers,
    ScorerLabel,
    is_of_run,
    planned_tasks,
)
from tentalis.ops.rescore.graders import Grader, LeftOut
from tentalis.rewards.score import score_of_result
from tentalis.rewards.verdict import ScorerAway
from tentalis.service.packages import MissingExtra
from tentalis.service.settings import Settings
from tentalis.storage.errors import StorageError
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RescoringWork:
    """The answers of a run that have no score of a label yet, with their old rewards. `already`: number of those that
    have one. `left_out`: answers that are not scored, with the reasons."""

    to_score: dict[str, float | None]
    already: int
    left_out: tuple[RescoredRow, ...]


def find_work(settings: Settings, run_id: str, label: ScorerLabel) -> RescoringWork:
    """Returns the answers of a run in the label's environment that are to be scored, with their old rewards.

    Raises NothingToScore, NoSuchTopic.
    """
    codec = make_codec(settings)
    scored = ScoredAnswers(str(label))
    for record in records_to_end(settings, (topics.HALVES,), codec):
        scored.apply(record)
    to_score: dict[str, float | None] = {}
    left_out: list[RescoredRow] = []
    already = 0
    seen: set[str] = set()
    planned: set[str] = set()
    for record in records_to_end(settings, (topics.BATCHES,), codec):
        if isinstance(record, BatchPlan) and record.run_id == run_id:
            planned |= planned_tasks(record)
    for result in _results(settings, codec):
        task = result.task
        if result.result_id in seen or task.environment != label.environment or not is_of_run(task, run_id, planned):
            continue
        seen.add(result.result_id)
        if result.result_id in scored.done:
            already += 1
        elif (reason := scored.left_out(result)) is not None:
            left_out.append(_row(result, scored.old.get(result.result_id), None, reason))
        else:
            to_score[result.result_id] = scored.old[result.result_id]
    if not seen:
        raise NothingToScore(
            f"the log has no results of run {run_id} in the environment {label.environment}. Results are kept for 30 "
            "days by default; `tentalis runs list` names the runs"
        )
    return RescoringWork(to_score, already, tuple(left_out))


def rescore(
    settings: Settings, work: RescoringWork, grader: Grader, *, write: bool, parallel: int = 4
) -> Iterator[RescoredRow]:
    """Scores answers, `parallel` at a time, and yields the result of each; with `write`, the scores are on the log
    when a row is yielded. A second call goes on where a stopped one ended, and writes no score twice.

    Raises ScorerAway, DeliveryFailed; and StorageError or MissingExtra if a file that an answer names cannot be read
    now.
    """
    codec = make_codec(settings)
    publisher = Publisher(settings, "tentalis-rescore", codec)
    label, missing = str(grader.label), set(work.to_score)

    async def scored(result: Result) -> RescoredRow:
        old = work.to_score[result.result_id]
        try:
            verdict = await grader.verdict(result)
        except LeftOut as reason:
            return _row(result, old, None, str(reason))
        except (ScorerAway, StorageError, MissingExtra):
            raise
        except Exception as error:
            log.exception("%s failed on result %s", label, result.result_id)
            return _row(result, old, None, f"{label} failed: {type(error).__name__}: {error}")
        if write:
            publisher.send(topics.HALVES, score_of_result(result, verdict, label, now_ms()))
        return _row(result, old, verdict.reward)

    def unscored() -> Iterator[Result]:
        for result in _results(settings, codec):
            if result.result_id in missing:
                missing.remove(result.result_id)
                yield result

    async def all_of(results: tuple[Result, ...]) -> list[RescoredRow]:
        return list(await asyncio.gather(*map(scored, results)))

    found = unscored()
    with asyncio.Runner() as runner:
        while results := tuple(islice(found, parallel)):
            rows = runner.run(all_of(results))
            publisher.flush()
            yield from rows


def _results(settings: Settings, codec: Codec) -> Iterator[Result]:
    """Yields the results on the log."""
    return (record for record in records_to_end(settings, (topics.RESULTS,), codec) if isinstance(record, Result))


def _row(result: Result, old: float | None, new: float | None, left_out: str | None = None) -> RescoredRow:
    return RescoredRow(result.task.task_id, result.sample_index, result.result_id, old, new, left_out)
