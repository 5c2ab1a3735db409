"""A plan on the log whose step is not finite: the trainer goes on without its culprits, killed at any point between."""

import signal
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import Drop
from tentalis.dlq.actions import raw_of
from tentalis.dlq.records import letter_of
from tentalis.kafka.consumer import messages_to_end
from tentalis.ops.verify import Log, LoggedRecord, check
from tests.integration.trainer.test_trainer_faults import ended
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.kafka_fixture import Kafka
from tests.support.trainer_lab import rollout, rollouts, tiny_model
from trainer.data.fetch import readable_rollouts
from trainer.data.plan import with_plan_id

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_run_that_an_earlier_release_poisoned_goes_on_wherever_it_is_killed(
    kafka: Kafka, unique: str, tmp_path: Path, model: Path
) -> None:
    lab = Lab(kafka, unique, tmp_path, model)
    run_config = lab.config(steps=3)
    lab.put_groups(2)
    code, text = ended(lab, run_config, "first", "steps=1")
    assert code == 0, text
    poison = [rollout(f"{lab.policy}-poison{k}", policy=lab.policy, temperature=1e-39) for k in range(2)]
    lab.put(*poison)
    lab.put(*rollouts(4, seed=1, policy=lab.policy, prefix=f"{lab.policy}-later-"))
    # What a release without bounds planned: six honest rollouts and both poisoned ones.
    run = lab.run_log(run_config)
    first = run.plans[1, 1]
    there = {r.key: stored for stored, r in readable_rollouts(lab.settings, lab.codec) if r.head.policy == lab.policy}
    records = {r.key: r for _, r in readable_rollouts(lab.settings, lab.codec) if r.key in there}
    honest = sorted(set(there) - {row.rollout_id for row in first.rows} - {r.key for r in poison})[:6]
    keys = [honest[0], poison[0].key, *honest[1:], poison[1].key]
    rows = tuple(
        first.rows[0].model_copy(
            update={
                "rollout_id": key,
                "digest": records[key].digest,
                "partition": there[key].partition,
                "offset": there[key].offset,
                "n_tokens": records[key].n_tokens,
                "opd": records[key].has_opd,
            }
        )
        for key in keys
    )
    poisoned = with_plan_id(first.model_copy(update={"step": 2, "rows": rows, "drops": ()}))
    lab.publisher.send(topics.BATCHES, poisoned)
    lab.publisher.flush()
    # Killed with the letters written and the next attempt in an open transaction, then before its step.
    for number, cut in enumerate(("commit BatchPlan 2", "committed BatchPlan 2")):
        code, text = ended(lab, run_config, f"cut{number}", f"SIGKILL at {cut}")
        assert code == -signal.SIGKILL, text
        assert "2 of its 8 rollouts make it not finite" in text
    code, text = ended(lab, run_config, "last")
    assert code == 0, text
    assert "not finite" not in text, "the next attempt is on the log"

    run = lab.run_log(run_config)
    assert {key for key in run.plans if key[0] == 2} == {(2, 1), (2, 2)}
    assert run.plans[2, 1] == poisoned
    assert [row.rollout_id for row in run.plans[2, 2].rows] == honest
    places = sorted((there[r.key].partition, there[r.key].offset) for r in poison)
    assert sorted(run.plans[2, 2].drops, key=lambda drop: drop.first_offset + 1e9 * drop.partition) == [
        Drop(partition=p, first_offset=o, last_offset=o, count=1, reason="temperature out of bounds") for p, o in places
    ]
    assert [run.results[step, attempt].step for step, attempt in ((1, 1), (2, 2), (3, 1))] == [1, 2, 3]
    letters = [
        letter
        for message in messages_to_end(lab.settings, topics.dlq(topics.ROLLOUTS))
        if (letter := letter_of(raw_of(message))).key and letter.key.startswith(lab.policy.encode())
    ]
    assert sorted((each.origin.partition, each.origin.offset) for each in letters if each.origin) == places
    assert {(each.stage, each.error_class) for each in letters} == {("train", "UntrainableRollout")}
    assert all(f"dropped from step 2 of run {run_config.run_id}: temperature" in each.error for each in letters)

    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report
    assert not verified(lab, run_config.run_id)


def verified(lab: Lab, run_id: str) -> list[str]:
    """Returns the verifier's findings on the run's plans and steps; its rollouts have no tasks."""
    run, log = lab.run_log(lab.config()), Log(run_id)
    manifests, plans, steps, updates = (
        list(records.values()) for records in (run.manifests, run.plans, run.results, run.updates)
    )
    for name, records in (("manifests", manifests), ("plans", plans), ("steps", steps), ("updates", updates)):
        getattr(log, name).extend(LoggedRecord(record, "t", 0, offset, 0) for offset, record in enumerate(records))
    for stored, record in readable_rollouts(lab.settings, lab.codec):
        if record.head.policy == lab.policy:
            log.rollouts.append(LoggedRecord(record, stored.topic, stored.partition, stored.offset, 0))
    about_training = ("untrained-", "drop-", "step-", "two-results", "result-", "plan-", "trained-", "manifest-")
    return [str(each) for each in check(log).problems if each.rule.startswith(about_training)]
