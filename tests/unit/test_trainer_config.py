"""The configuration file, and offers."""

from pathlib import Path

import pytest

from schemas.records import PolicySpan, Sampling
from schemas.tensors import uint8_bytes
from tests.trainer_lab import rollout
from trainer.config import ConfigError, TrainerConfig, config_text, load_config, parse_config
from trainer.offers import Offer, Segment, malformed, offer_of

MINIMAL = "run_id: r\npolicy: p\nbase_model: smollm2\nbase_model_name: smollm2\n"


def test_the_resolved_text_is_the_configuration() -> None:
    of = parse_config(MINIMAL + "start: {0: 5, 3: 7}\nlora: {rank: 8}\n", "x.yaml")
    assert of.start == {0: 5, 3: 7}
    assert (of.lora.rank, of.batch_rollouts, of.loss.clip_high) == (8, 32, 0.28)
    text = config_text(of)
    assert parse_config(text, "again") == of
    assert "opd_clip: 1.0" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("batch_rolouts: 3\n", "x.yaml: batch_rolouts: no such setting, did you mean batch_rollouts?"),
        ("optimizer: {learning_rate: 1}\n", "optimizer.learning_rate: no such setting"),
        ("loss: {clip_hihg: 1}\n", "loss.clip_hihg: no such setting, did you mean clip_high?"),
        ("lora: {dropout: 0.1}\n", "lora.dropout: Input should be less than or equal to 0"),
        ("steps: -1\n", "steps: Input should be greater than or equal to 0"),
        ("policy: a/b\n", "policy: String should match"),
    ],
)
def test_what_is_wrong_is_named(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(MINIMAL + line, "x.yaml")
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="a mapping of settings is expected, not list"):
        parse_config("- a", "x")


def test_every_setting_is_documented() -> None:
    undocumented = []
    for name, field in TrainerConfig.model_fields.items():
        if name not in ("lora", "optimizer", "loss") and not field.description:
            undocumented.append(name)
        inner = getattr(field.annotation, "model_fields", {})
        undocumented += [f"{name}.{key}" for key, part in inner.items() if not part.description]
    assert undocumented == []


def test_an_offer_says_what_trains() -> None:
    both = rollout(teacher=[-1, -1, -1], reward=0.5, rewards=[0.5, 0.0], n=2, version=3)
    assert offer_of(both, 1, 9, 77, 100) == Offer("t0/0", "t0", both.digest, 1, 9, 77, 7, True, True, 3, None)
    alone = rollout(reward=0.5, rewards=[0.5], n=2, teacher=[-1, -1, -1])
    assert (offer_of(alone, 0, 0, 0, 100).rl, offer_of(alone, 0, 0, 0, 100).opd) == (False, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sampling": Sampling(temperature=0.0)}, "greedy sampling"),
        ({"sampling": Sampling(top_p=0.9)}, "truncated sampling"),
        ({"loss_mask": uint8_bytes([0] * 7)}, "no response tokens"),
        ({"forgotten": True}, "forgotten"),
        ({"n_requested": 2}, "fewer than two samples of its group closed"),
        ({"has_rl": False}, "neither reward nor teacher"),
        ({"policy_spans": (PolicySpan(start=4, policy="base"),)}, "sampled by no version of its policy"),
        ({"policy_spans": (PolicySpan(start=4, policy="other@v1"),)}, "sampled by no version of its policy"),
    ],
)
def test_what_cannot_be_trained_on_says_why(change: dict[str, object], reason: str) -> None:
    assert offer_of(rollout().model_copy(update=change), 0, 0, 0, 100).unfit == reason


def test_the_oldest_version_counts() -> None:
    spans = (PolicySpan(start=4, policy="tiny@v7"), PolicySpan(start=5, policy="tiny@v5"))
    assert offer_of(rollout().model_copy(update={"policy_spans": spans}), 0, 0, 0, 100).oldest_version == 5
    assert offer_of(rollout(), 0, 0, 0, 6).unfit == "over 6 tokens"


def test_contradicting_fields_are_malformed() -> None:
    good = rollout(teacher=[-1, -1, -1])
    assert malformed(good, 64) is None
    assert malformed(good, 12) == "token ids outside the model's vocabulary of 12"
    assert malformed(good.model_copy(update={"loss_mask": b"\1"}), 64) == "7 tokens but 1 values in loss_mask"
    assert (
        malformed(good.model_copy(update={"teacher_logprobs": b""}), 64) == "7 tokens but 0 values in teacher_logprobs"
    )
    assert "nothing comes before it" in str(malformed(good.model_copy(update={"loss_mask": b"\1" * 7}), 64))


def test_segments_travel_as_json() -> None:
    part = Segment(2, 5, 9, (offer_of(rollout(), 2, 7, 1, 100),))
    assert Segment.from_json(part.to_json()) == part
