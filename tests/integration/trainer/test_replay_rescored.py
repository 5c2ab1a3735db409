"""A run trained again with the scores of another verifier as its rewards, on a real broker."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.records import Rollout, Sample, Score, Source
from tentalis.kafka.consumer import read_to_end
from tests.integration.trainer.test_replay_elsewhere import commands, written_under
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.kafka_fixture import Kafka
from tests.support.trainer_lab import tiny_model

pytestmark = [pytest.mark.broker, pytest.mark.long]

SAME, OTHER = "chat/same@1", "chat/other@1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path, model: Path) -> Lab:
    return Lab(kafka, unique[-14:].strip("-"), tmp_path, model)


def put_scores(lab: Lab, label: str, rollouts: Sequence[Rollout], reward: Callable[[Rollout], float | None]) -> None:
    """Scores as `tentalis rescore` writes them."""
    for each in rollouts:
        sample = Sample(
            head=each.head,
            sample_index=each.sample_index,
            result_id=each.result_id,
            response_digest="d",
            token_ids=each.token_ids,
            loss_mask=each.loss_mask,
            sampler_logprobs=each.sampler_logprobs,
        )
        half = Score(
            score_id=f"{label}-{each.result_id}",
            event_time=1,
            opened_at=1,
            sample=sample,
            source=Source.RESULT,
            reward=reward(each),
            scorer=label,
        )
        lab.publisher.send(topics.HALVES, half)
    lab.publisher.flush()


def contents(lab: Lab, run_id: str) -> list[tuple[str, str | None, bytes | None]]:
    """Every record under a counterfactual's name, also its rollouts."""
    return sorted(
        (topic, stored.key, stored.value)
        for topic in (topics.RUNS, topics.BATCHES, topics.ROLLOUTS)
        for stored in read_to_end(lab.settings, topic)
        if stored.key is not None and stored.key.startswith(f"{run_id}/")
    )


def test_a_run_is_trained_again_with_the_scores_of_another_verifier(lab: Lab) -> None:
    recorded = lab.put_groups(6)
    run_config = lab.config()
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    run = run_config.run_id
    trained = [row.rollout_id for step in (1, 2, 3) for row in lab.run_log(run_config).plans[step, 1].rows]

    def told(code: int, report: dict[str, Any] | None, logged: str, *_: Any) -> str:
        return f"{code} {report} {logged}"

    put_scores(lab, SAME, recorded, lambda each: each.reward)
    put_scores(lab, OTHER, recorded[:-1], lambda each: 1.0 - (each.reward or 0.0) ** 2)
    unknown, missing, same, allowed = commands(
        lab.folder,
        lab.environment(),
        ["replay", run, "--verifier", "chat/none@1"],
        ["replay", run, "--verifier", OTHER],
        ["replay", run, "--verifier", SAME],
        ["replay", run, "--verifier", OTHER, "--allow-unscored"],
    )
    assert unknown[0] == 1 and f"{SAME} (24 answers)" in unknown[1]["problems"][0], told(*unknown)
    last = recorded[-1].rollout_id
    assert missing[0] == 1 and f"unscored: {last}: no score of {OTHER}" in missing[1]["problems"][0], told(*missing)
    assert "1 rewarded rollouts" in missing[1]["problems"][0], told(*missing)

    # The same rewards give the recorded run, to the byte: groups, order, advantages and plans are those of the run.
    assert same[0] == 0, told(*same)
    steps = same[1]["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["changed_sha256"] == step["recorded_sha256"] for step in steps), steps
    assert all(step["difference"]["reward_mean"] == step["kl_to_recorded"] == 0.0 for step in steps), steps

    code, report, _ = allowed
    assert code == 0, told(*allowed)
    assert report["changes"] == {"verifier": {"recorded": "not on the log", "changed": OTHER}}
    assert report["rescoring"]["unscored"] == {last: f"no score of {OTHER}"}
    assert (report["rescoring"]["scored"], report["rescoring"]["unknown"]) == (23, 0)
    for step in report["steps"]:
        assert step["changed_sha256"] != step["recorded_sha256"] and step["kl_to_recorded"] > 0
        assert (
            step["difference"]["reward_mean"] == step["changed"]["reward_mean"] - step["recorded"]["reward_mean"] != 0
        )
    own = run_config.model_copy(update={"run_id": report["run_id"]})
    rows = [row.rollout_id for step in (1, 2, 3) for row in lab.run_log(own).plans[step, 1].rows]
    dropped = sum(report["rescoring"]["dropped"].values())
    assert rows == [f"{report['run_id']}/{key}" for key in trained if key != last or not dropped]

    before = contents(lab, report["run_id"])
    again, replayed = commands(
        lab.folder,
        lab.environment(),
        ["replay", run, "--verifier", OTHER, "--allow-unscored"],
        ["replay", report["run_id"]],
    )
    assert again[0] == 0 and again[1]["steps"] == report["steps"], told(*again)
    assert set(contents(lab, report["run_id"])) == set(before), "the same question twice is the same records"
    assert sum(topic == topics.ROLLOUTS for topic, *_ in contents(lab, report["run_id"])) == len(rows)
    assert set(written_under(lab, report["run_id"])) == {(2, 1)}
    assert (replayed[0], replayed[1]["equal"], len(replayed[1]["steps"])) == (0, True, 4), told(*replayed)

    # A trainer of the recorded policy reads past them: nothing is left for a further step.
    longer = run_config.model_copy(update={"steps": 4})
    assert lab.train(longer, "caught_up") == 0, lab.log_text(run_config)
    assert lab.run_log(run_config).last_step == 3, lab.log_text(run_config)
