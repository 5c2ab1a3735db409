"""Full fine-tuning on a real broker: trained from the topic, resumed from a checkpoint, replayed."""

import shutil
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from schemas.ids import sha256_hex
from tests.integration.trainer.test_trainer_run import Lab
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.trainer_lab import rollouts, tiny_model
from trainer.run.checkpoint import checkpoint_root

pytestmark = pytest.mark.broker


@pytest.fixture
def lab(kafka: Kafka, unique: str, tmp_path: Path) -> Lab:
    return Lab(kafka, unique, tmp_path, tiny_model(tmp_path / "model"))


def test_a_fully_trained_run_resumes_and_replays_to_the_same_bytes(lab: Lab) -> None:
    lab.put_groups(7)
    settings = {"lora": None, "optimizer": {"lr": 1e-3}, "loss": {"kl": {"coef": 0.1, "against": "base"}}}
    run_config = lab.config(**settings)
    assert lab.train(run_config, "steps=2") == 0, lab.log_text(run_config)
    # The newest checkpoint is lost, so step 2 is trained again from its plan before step 3.
    root = checkpoint_root(lab.settings, run_config.run_id)
    shutil.rmtree(next(root.glob("000002-*")))
    assert lab.train(run_config) == 0, lab.log_text(run_config)
    assert "step 2 was trained again from its plan" in lab.log_text(run_config)
    run = lab.run_log(run_config)
    assert run.last_step == 3 and len(set(lab.hashes(run_config))) == 4
    for step in range(4):
        update, result = run.updates[step], run.winning_result(step)
        assert result is not None and update.is_whole_model and update.sha256 == result.adapter_sha256
        folder = Path(update.location.removeprefix("file://"))
        assert sha256_hex((folder / "model.safetensors").read_bytes()) == update.sha256
        assert (folder / "tokenizer.json").exists() and not (folder / "optimizer.safetensors").exists()
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 64
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report


@pytest.mark.long  # tests/unit/trainer/test_ranks.py has the steps of two ranks without a broker
@pytest.mark.timeout(1500)
def test_two_ranks_that_share_the_moments_of_a_whole_model_resume_after_a_kill(lab: Lab) -> None:
    made = rollouts(7, policy=lab.policy, prefix=f"{lab.policy}-")
    run_config = lab.config(lora=None, optimizer={"lr": 1e-3}, zero_stage=1)
    lab.put(*made[:12])
    with lab.by_command(run_config, ranks=2) as launcher:
        eventually(lambda: lab.run_log(run_config).last_step == 1, 400, 0.2, lambda: lab.log_text(run_config))
        rank_processes = psutil.Process(launcher.pid).children()
        next(rank for rank in rank_processes if rank.environ()["RANK"] == "1").kill()
        assert launcher.wait(60) == 1
    lab.put(*made[12:])
    with lab.by_command(run_config, ranks=2) as launcher:
        assert launcher.wait(400) == 0, lab.log_text(run_config)
    run = lab.run_log(run_config)
    assert [(plan.attempt, plan.world_size) for plan in run.plans.values()] == [(1, 2)] * 3
    assert {row.rank for plan in run.plans.values() for row in plan.rows} == {0, 1}
    assert len(set(lab.hashes(run_config))) == 4
    code, report = lab.replay(run_config)
    assert (code, report["equal"], len(report["steps"])) == (0, True, 4), report
