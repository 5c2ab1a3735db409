"""The configuration file, and offers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from schemas.records import PolicySpan, Sampling
from schemas.tensors import uint8_bytes
from tests.trainer_lab import rollout
from trainer import config_page
from trainer.aliases import KEYS, VARIABLES
from trainer.config import ConfigError, TrainerConfig, config_text
from trainer.config_file import known_names, load_config, overridden, parse_config, section_of
from trainer.config_print import commented
from trainer.losses.settings import Kl
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
        ("optimizer: {learning_rate: 1}\n", "optimizer.learning_rate: no such setting, did you mean lr?"),
        ("loss: {ppo_clip_ratio: 1}\n", "loss.ppo_clip_ratio: no such setting, did you mean clip_low?"),
        ("gae_lamda: 1\n", "gae_lamda: no such setting, did you mean gae_lambda?"),
        ("xyzzy: 1\n", "x.yaml: xyzzy: no such setting"),
        ("loss: {clip_hihg: 1}\n", "loss.clip_hihg: no such setting, did you mean clip_high?"),
        ("loss: {kind: cipso}\n", "or 'truncated_is', did you mean cispo?"),
        ("loss: {advantage: grpo_mean}\n", "or 'gae', did you mean group_mean?"),
        ("loss: {pair: {kind: contrastive}}\n", "did you mean contrastive_pair?"),
        ("lora: {dropout: 0.1}\n", "lora.dropout: Input should be less than or equal to 0"),
        ("steps: -1\n", "steps: Input should be greater than or equal to 0"),
    ],
)
def test_what_is_wrong_is_named(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(MINIMAL + line, "x.yaml")
    assert message in str(error.value)


def test_a_policy_whose_name_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml: policy: String should match"):
        parse_config(MINIMAL.replace("policy: p", "policy: a/b"), "x.yaml")


def test_a_file_that_is_not_there_or_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="a mapping with settings is expected, not list"):
        parse_config("- a", "x")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("steps: 3\nlora: {}\nsteps: 4\n", "steps: there twice.*line 7, column 1"),
        ("loss: {kind: cispo, kind: gspo}\n", "kind: there twice.*line 5, column 21"),
        ("start:\n  0: 4\n  0: 4\n", "0: there twice.*line 7, column 3"),
    ],
)
def test_a_setting_that_is_there_twice_is_refused_with_its_place(lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)x.yaml: not YAML: {message}"):
        parse_config(MINIMAL + lines, "x.yaml")


def test_a_change_that_says_something_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--set: loss: not YAML: kind: there twice"):
        overridden(parse_config(MINIMAL, "x"), {"loss": "{kind: cispo, kind: gspo}"}, "--set")


def undocumented(model: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            yield from undocumented(section, f"{before}{name}.")
        if not (field.description or (section and section.__doc__)):
            yield before + name


def test_every_setting_is_documented() -> None:
    assert list(undocumented(TrainerConfig)) == []


def test_the_printed_configuration_reads_back_and_explains_every_setting() -> None:
    text = commented()
    assert parse_config(text, "printed") == TrainerConfig(
        run_id="run-1", policy="assistant", base_model="smollm2", base_model_name="smollm2"
    )
    assert "# Learning rate" in text and "One of auto, cpu, cuda." in text and "run_id: run-1" in text
    of = parse_config(MINIMAL + "start: {0: 5}\nlora: {targets: [q_proj]}\nsteps: 3\nlr: 1e-5\n", "x.yaml")
    assert parse_config(commented(of), "again") == of


def test_toml_is_understood_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'run_id = "r"\npolicy = "p"\nbase_model = "m"\nbase_model_name = "m"\n[optimizer]\nlr = 1e-5\n[start]\n0 = 7\n'
    )
    of = load_config(path)
    assert (of.optimizer.lr, of.start) == (1e-5, {0: 7})
    path.write_text("run_id: r\n")
    with pytest.raises(ConfigError, match=r"run\.toml: not TOML"):
        load_config(path)


@pytest.mark.parametrize(
    ("line", "setting", "value"),
    [
        ("method: binary\nbinary_weight: 0.5\n", ("loss", "rl_weight"), 0.5),
        ("method: binary\n", ("loss", "opd_weight"), 0.0),
        ("method: opd\n", ("loss", "rl_weight"), 0.0),
        ("method: combine\nopd_weight: 2\n", ("loss", "opd_weight"), 2.0),
        ("ppo_clip_ratio: 0.1\n", ("loss", "clip_low"), 0.1),
        ("ppo_clip_ratio: 0.1\n", ("loss", "clip_high"), 0.1),
        ("eps_clip: 0.1\neps_clip_high: 0.3\n", ("loss", "clip_high"), 0.3),
        ("kl_loss_coef: 0.02\n", ("loss", "kl"), Kl(coef=0.02, against="base")),
        ("kl_coef: 0.02\nloss: {kl: {against: sampler}}\n", ("loss", "kl"), Kl(coef=0.02)),
        ("learning_rate: 1e-4\n", ("optimizer", "lr"), 1e-4),
        ("lora_rank: 4\n", ("lora", "rank"), 4),
        ("loss: dapo\n", ("loss", "kind"), "dapo"),
        ("loss: dapo\nppo_clip_ratio: 0.1\n", ("loss", "kind"), "dapo"),
        ("lora: {}\n", ("lora", "rank"), 16),
    ],
)
def test_the_keys_of_other_systems_are_understood(line: str, setting: tuple[str, str], value: object) -> None:
    of = parse_config(MINIMAL + line, "x.yaml")
    assert getattr(getattr(of, setting[0]), setting[1]) == value


def test_the_ancestors_variables_fill_in_what_the_file_leaves_open(caplog: pytest.LogCaptureFixture) -> None:
    environment = {
        "TRAINING_LR": "1e-4",
        "TRAINING_LORA_RANK": "4",
        "TRAINING_MODEL": "org/m",
        "TRAINING_GROUP_SIZE": "4",
        "TRAINING_LORA_RNK": "8",
    }
    of = parse_config("run_id: r\npolicy: p\n", "x.yaml", environment)
    assert (of.optimizer.lr, of.lora.rank, of.lora.alpha) == (1e-4, 4, 8.0)
    assert (of.base_model, of.base_model_name) == ("org/m", "m")
    assert "TRAINING_GROUP_SIZE is set and means nothing here: a task says how many" in caplog.text
    assert "TRAINING_LORA_RNK is set and means nothing here: did you mean TRAINING_LORA_RANK?" in caplog.text
    same = parse_config(
        MINIMAL + "lr: 0.0001\nlora: {alpha: 16}\n",
        "x.yaml",
        {"TRAINING_LR": "1e-4"} | environment | {"TRAINING_MODEL": "smollm2"},
    )
    assert (same.optimizer.lr, same.lora.alpha) == (1e-4, 16.0)


@pytest.mark.parametrize(
    ("line", "variables", "message"),
    [
        ("lr: 1\noptimizer: {lr: 2}\n", {}, "lr and optimizer.lr contradict each other: optimizer.lr would be 1 and 2"),
        ("lr: 1\nlearning_rate: 2\n", {}, "lr and learning_rate contradict each other"),
        ("method: opd\nbinary_weight: 1\n", {}, "method and binary_weight contradict each other: loss.rl_weight"),
        ("optimizer: {lr: 2}\n", {"TRAINING_LR": "1"}, "optimizer.lr and TRAINING_LR contradict each other"),
        ("method: both\n", {}, "x.yaml: method: binary, opd or combine, not 'both'"),
        ("lr: -1\n", {}, "x.yaml: lr (optimizer.lr): Input should be greater than 0"),
        ("lerning_rate: 1\n", {}, "lerning_rate: no such setting, did you mean learning_rate?"),
        ("clip_low: 1\n", {}, "clip_low: no such setting, did you mean loss.clip_low?"),
        ("lora: {targets: []}\n", {}, "lora.targets"),
        ("lora: 3\n", {}, "x.yaml: lora: a mapping of its settings is expected (rank, alpha, targets, ...), not 3"),
        ("loss: dappo\n", {}, "did you mean dapo?"),
        ("", {"TRAINING_LR": "["}, "x.yaml: TRAINING_LR: not YAML: "),
    ],
)
def test_what_is_said_twice_or_wrongly_is_named(line: str, variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(MINIMAL + line, "x.yaml", variables)
    assert message in str(error.value)


def test_every_alias_means_settings_that_there_are() -> None:
    known = set(known_names())
    for name, alias in (KEYS | VARIABLES).items():
        assert set(alias.settings) <= known, name
    assert not set(KEYS) & set(TrainerConfig.model_fields)


def test_the_page_holds_every_setting_and_every_alias() -> None:
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    assert page == config_page.page(), "write it anew: python -m trainer.config_page docs/config.md"


def test_settings_changed_by_name() -> None:
    of = parse_config(MINIMAL, "x.yaml")
    changed = overridden(
        of, {"optimizer.lr": "1e-5", "ppo_clip_ratio": "0.1", "loss": "clipped", "start": "{0: 4}"}, "--set"
    )
    part = overridden(changed, {"loss": "{kind: gspo}"}, "--set").loss
    assert (part.kind, part.clip_high) == ("gspo", 0.1), "what a part does not name stays as it was"
    assert (changed.optimizer.lr, changed.loss.clip_high, changed.loss.kind, changed.start) == (
        1e-5,
        0.1,
        "clipped",
        {0: 4},
    )
    with pytest.raises(ConfigError, match=r"--set: optimizer\.lrr: no such setting, did you mean lr"):
        overridden(of, {"optimizer.lrr": "1"}, "--set")


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
        ({"n_requested": 2}, "fewer than two samples of its group have a reward"),
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


def test_one_window_needs_no_list_and_a_wrong_one_is_told_in_words() -> None:
    of = "run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\nwindows: "
    assert parse_config(of + "22:00-06:00", "f").windows == ("22:00-06:00",)
    with pytest.raises(ConfigError, match=r"^f: windows: '25:00-06:00': there is no such time of day"):
        parse_config(of + "25:00-06:00", "f")
