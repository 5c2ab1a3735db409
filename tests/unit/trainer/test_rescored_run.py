"""What is read from the log for other rewards, and what is written to it. There is no broker."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas import topics
from schemas.records import PlanRow, Record, Rollout
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import Stored
from tentalis.service.settings import Settings
from tests.support import loop_records
from tests.support.trainer_lab import config
from tests.unit.trainer.test_rescored import LABEL, POLICY, RUN, group, score, scores_of
from tests.unit.trainer.test_step import plan_for
from trainer.data.fetch import BadRollouts, RolloutProblem
from trainer.replay import rescored_run
from trainer.replay.recording import CannotReplay, RunRecording
from trainer.replay.rescored_rewards import RecordedAnswer, RescoredRewards
from trainer.replay.rescored_run import RewardSource, UnscoredAnswers, read_rewards, write_rollouts
from trainer.run.run_log import RunLog

SETTINGS, CODEC = Settings(), Codec()


class FakeLog:
    """The rollouts and halves on a log. `redact_later`: rollouts that are redacted while copies are written."""

    def __init__(self, rollouts: Sequence[Rollout], halves: Sequence[Record] = ()) -> None:
        self.rollouts, self.halves = list(rollouts), list(halves)
        self.sent: list[Rollout] = []
        self.redact_later: set[str] = set()

    def readable_rollouts(self, *_: object) -> Iterator[tuple[Stored, Rollout]]:
        for offset, each in enumerate([*self.rollouts, *self.sent]):
            yield Stored(topics.ROLLOUTS, 0, offset, 0, each.key, b"", ()), each

    def read_to_end(self, *_: object) -> Iterator[Any]:
        for offset, each in enumerate(self.halves):
            place = Stored(topics.HALVES, 0, offset, 0, each.key, b"", ()).place
            yield SimpleNamespace(value=b"", place=place, decode_own=lambda _, record=each: record)

    def fetch(self, _: object, __: object, rows: Sequence[PlanRow], ___: object) -> dict[str, Rollout]:
        by_key = {each.key: each for each in self.rollouts}
        return {row.rollout_id: by_key[row.rollout_id] for row in rows}

    def find_problems(
        self, _: object, __: object, rows: Sequence[PlanRow], ___: object, places: dict[str, tuple[int, int]]
    ) -> list[RolloutProblem]:
        for stored, each in self.readable_rollouts():
            places[each.key] = stored.partition, stored.offset
        return [RolloutProblem("forgotten", row.rollout_id, "") for row in rows if row.rollout_id in self.redact_later]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeLog":
        for name in ("readable_rollouts", "read_to_end", "fetch", "find_problems"):
            monkeypatch.setattr(rescored_run, name, getattr(self, name))
        publisher = SimpleNamespace(send=lambda _, record, **__: self.sent.append(record), flush=lambda: None)
        monkeypatch.setattr(rescored_run, "Publisher", lambda *_: publisher)
        return self


def recording(rollouts: list[Rollout], metrics: Mapping[str, float] | None = None, **more: Any) -> RunRecording:
    """A run with one step on these rollouts."""
    plan = plan_for(rollouts).model_copy(update=more)
    results = (loop_records.step_result(0, 0, metrics=metrics or {}), loop_records.step_result(1, 1))
    return RunRecording(RunLog("run", "tiny"), results, (plan,), None, (), {}, 2)


def written(log: FakeLog, recorded: list[Rollout], new: Sequence[float | None], **more: Any) -> RunRecording:
    rewards = RescoredRewards.of(map(RecordedAnswer.of, recorded), scores_of(recorded, new))
    configs = {"m": config(Path("m"))}
    return write_rollouts(recording(recorded, **more), rewards, configs, RUN, POLICY, SETTINGS, CODEC)


def test_the_scores_of_the_label_are_taken_and_those_that_are_missing_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = [*group("t", [1.0, 0.0]), *group("other", [1.0, 0.0])]
    halves = [score(recorded[0], 1.0, "old"), score(recorded[0], 0.5), score(recorded[2], 0.5)]
    log = FakeLog(recorded, halves).install(monkeypatch)
    plans = [plan_for(recorded[:1])]
    with pytest.raises(UnscoredAnswers, match=rf"unscored: t/1: no score of {LABEL}\n1 rewarded rollouts") as refused:
        read_rewards(RewardSource(LABEL), plans, SETTINGS, CODEC)
    assert "other" not in str(refused.value), "its group has no rollout in the plans"
    rewards = read_rewards(RewardSource(LABEL, allow_unscored=True), plans, SETTINGS, CODEC)
    assert list(rewards.unscored) == ["t/1"] and list(rewards.groups) == ["t"] and rewards.recorded == "old"
    assert rewards.scores[recorded[0].result_id][1].offset == 1
    log.halves.append(score(recorded[0], 0.0))
    with pytest.raises(CannotReplay, match="two different scores"):
        read_rewards(RewardSource(LABEL), plans, SETTINGS, CODEC)


def test_an_altered_rollout_of_a_group_is_refused_also_if_no_plan_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, other = group("t", [1.0, 0.0])
    FakeLog([planned, other.model_copy(update={"n_closed": 9})]).install(monkeypatch)
    with pytest.raises(CannotReplay, match=r"forged: t/1: tentalis.rollouts.v1\[0\]@1 has content"):
        read_rewards(RewardSource(LABEL), [plan_for([planned])], SETTINGS, CODEC)


def test_rollouts_are_written_once_and_the_plans_name_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = group("t", [1.0, 0.0])
    log = FakeLog(recorded).install(monkeypatch)
    (plan,) = written(log, recorded, [0.0, 1.0]).plans
    assert [each.key for each in log.sent] == [f"{RUN}/t/0", f"{RUN}/t/1"] == [row.rollout_id for row in plan.rows]
    assert [row.offset for row in plan.rows] == [2, 3]
    (again,) = written(log, recorded, [0.0, 1.0]).plans
    assert len(log.sent) == 2 and again == plan


def test_what_is_erased_while_it_is_copied_is_redacted_in_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = group("t", [1.0, 0.0])
    log = FakeLog(recorded).install(monkeypatch)
    log.redact_later = {"t/1"}
    with pytest.raises(BadRollouts):
        written(log, recorded, [0.0, 1.0])
    assert [(each.key, each.forgotten) for each in log.sent[2:]] == [(f"{RUN}/t/1", True)]
    assert not log.sent[-1].token_ids


def test_the_first_baseline_is_the_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = group("t", [1.0])
    log = FakeLog(recorded).install(monkeypatch)
    metrics = {"baseline_rewards": 1.0, "baseline_answers": 4.0}
    (plan,) = written(log, recorded, [0.5], metrics=metrics, baseline=0.25).plans
    assert plan.baseline == 0.25
    with pytest.raises(CannotReplay, match=r"the running baseline before step 1 is None by the results .* and 0.25 by"):
        written(log, recorded, [0.5], baseline=0.25)
