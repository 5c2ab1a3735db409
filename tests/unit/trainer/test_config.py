"""The configuration file, and offers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from schemas.records import PolicySpan, Sampling
from schemas.tensors import int32_bytes, uint8_bytes
from tentalis.policies.guard import GuardMode, GuardRule
from tests.support import ROOT
from tests.support.trainer_lab import rollout
from trainer.config import page as config_page
from trainer.config.aliases import (
    IGNORED_SECTION_KEYS,
    IGNORED_VARIABLES,
    KEY_ALIASES,
    SECTION_ALIASES,
    VARIABLE_ALIASES,
)
from trainer.config.commented import commented_yaml
from trainer.config.conversation import ANCHOR, anchored
from trainer.config.file import known_names, load_config, override_settings, parse_config, section_of
from trainer.config.loss import KlConfig, LossConfig, PairLossConfig
from trainer.config.trainer_config import ConfigError, TrainerConfig, config_text, given_text
from trainer.data.candidates import (
    NOTHING_BEFORE,
    Offer,
    ReadSegment,
    malformed_reason,
    offer_of,
    untrainable_tokens,
)

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
    with pytest.raises(ConfigError, match="expected a mapping with settings, not list"):
        parse_config("- a", "x")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("steps: 3\nlora: {}\nsteps: 4\n", "steps: duplicate key.*line 7, column 1"),
        ("loss: {kind: cispo, kind: gspo}\n", "kind: duplicate key.*line 5, column 21"),
        ("start:\n  0: 4\n  0: 4\n", "0: duplicate key.*line 7, column 3"),
    ],
)
def test_a_setting_that_is_there_twice_is_refused_with_its_place(lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)x.yaml: not YAML: {message}"):
        parse_config(MINIMAL + lines, "x.yaml")


def test_a_change_that_says_something_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--set: loss: not YAML: kind: duplicate key"):
        override_settings(parse_config(MINIMAL, "x"), {"loss": "{kind: cispo, kind: gspo}"}, "--set")


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
    text = commented_yaml()
    assert parse_config(text, "printed") == TrainerConfig(
        run_id="run-1", policy="assistant", base_model="smollm2", base_model_name="smollm2"
    )
    assert "# Learning rate" in text and "One of auto, cpu, cuda." in text and "run_id: run-1" in text
    of = parse_config(MINIMAL + "start: {0: 5}\nlora: {targets: [q_proj]}\nsteps: 3\nlr: 1e-5\n", "x.yaml")
    assert parse_config(commented_yaml(of), "again") == of


def test_toml_is_understood_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'run_id = "r"\npolicy = "p"\nbase_model = "m"\nbase_model_name = "m"\n[optimizer]\nlr = 1e-5\n[start]\n0 = 7\n'
    )
    of = load_config(path)
    assert (of.optimizer.lr, of.start) == (1e-5, {0: 7})
    for text in ("run_id: r\n", "run_id = " + "[" * 10_000):
        path.write_text(text)
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
        ("kl_loss_coef: 0.02\n", ("loss", "kl"), KlConfig(coef=0.02, against="base")),
        ("kl_coef: 0.02\nloss: {kl: {against: sampler}}\n", ("loss", "kl"), KlConfig(coef=0.02)),
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
    assert "TRAINING_GROUP_SIZE is set but has no effect: each task sets its number of samples" in caplog.text
    assert "TRAINING_LORA_RNK is set but has no effect: did you mean TRAINING_LORA_RANK?" in caplog.text
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
    for name, alias in [
        *KEY_ALIASES.items(),
        *VARIABLE_ALIASES.items(),
        *(item for keys in SECTION_ALIASES.values() for item in keys.items()),
    ]:
        assert set(alias.settings) <= known, name
    assert not set(VARIABLE_ALIASES) & set(IGNORED_VARIABLES)
    assert not any(set(keys) & set(IGNORED_SECTION_KEYS[section]) for section, keys in SECTION_ALIASES.items())
    assert not set(SECTION_ALIASES) & set(TrainerConfig.model_fields)
    assert not set(KEY_ALIASES) & set(TrainerConfig.model_fields)


def test_the_page_holds_every_setting_and_every_alias() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    assert page == config_page.render_page(), "write it anew: python -m trainer.config.page docs/reference/config.md"


def test_settings_changed_by_name() -> None:
    of = parse_config(MINIMAL, "x.yaml")
    changed = override_settings(
        of, {"optimizer.lr": "1e-5", "ppo_clip_ratio": "0.1", "loss": "clipped", "start": "{0: 4}"}, "--set"
    )
    part = override_settings(changed, {"loss": "{kind: gspo}"}, "--set").loss
    assert (part.kind, part.clip_high) == ("gspo", 0.1), "what a part does not name stays as it was"
    assert (changed.optimizer.lr, changed.loss.clip_high, changed.loss.kind, changed.start) == (
        1e-5,
        0.1,
        "clipped",
        {0: 4},
    )
    with pytest.raises(ConfigError, match=r"--set: optimizer\.lrr: no such setting, did you mean lr"):
        override_settings(of, {"optimizer.lrr": "1"}, "--set")


def test_an_offer_says_what_trains() -> None:
    both = rollout(teacher=[-1, -1, -1], reward=0.5, rewards=[0.5, 0.0], n=2, version=3)
    assert offer_of(both, 1, 9, 77, 100) == Offer("t0/0", "t0", both.digest, 1, 9, 77, 7, True, True, 3, 3, None)
    alone = rollout(reward=0.5, rewards=[0.5], n=2, teacher=[-1, -1, -1])
    assert (offer_of(alone, 0, 0, 0, 100).rl, offer_of(alone, 0, 0, 0, 100).opd) == (False, True)


@pytest.mark.parametrize(
    ("loss", "rewards", "teacher", "parts", "unfit"),
    [
        (LossConfig(opd_weight=0), [0.5, 0.0], True, (True, False), None),
        (LossConfig(opd_weight=0, dynamic_sampling=True), [0.5, 0.5], True, (False, False), "equal rewards"),
        (LossConfig(dynamic_sampling=True), [0.5, 0.5], True, (False, True), None),
        (LossConfig(opd_weight=0), None, True, (False, False), "a hint, which opd_weight 0 does not read"),
        (LossConfig(rl_weight=0), [0.5, 0.0], True, (True, True), None),
        (
            LossConfig(rl_weight=0),
            [0.5, 0.0],
            False,
            (True, False),
            "no hint, and rl_weight 0 does not read the reward",
        ),
        (LossConfig(rl_weight=0, pair=PairLossConfig(weight=1)), [0.5, 0.0], False, (True, False), None),
        (LossConfig(rl_weight=0, opd_weight=0), [0.5, 0.0], False, (True, False), None),
    ],
)
def test_a_part_that_no_loss_reads_is_not_offered(
    loss: LossConfig, rewards: list[float] | None, teacher: bool, parts: tuple[bool, bool], unfit: str | None
) -> None:
    given: dict[str, Any] = {} if rewards is None else {"reward": 0.5, "rewards": rewards, "n": 2}
    of = rollout(teacher=[-1, -1, -1] if teacher else None, **given)
    if rewards is None:
        of = of.model_copy(update={"has_rl": False, "reward": None})
    offer = offer_of(of, 0, 0, 0, 100, loss)
    assert ((offer.rl, offer.opd), offer.unfit) == (parts, unfit)


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


def test_the_oldest_and_the_newest_version_count() -> None:
    spans = (PolicySpan(start=4, policy="tiny@v7"), PolicySpan(start=5, policy="tiny@v5"))
    found = offer_of(rollout().model_copy(update={"policy_spans": spans}), 0, 0, 0, 100)
    assert (found.oldest_version, found.newest_version) == (5, 7)
    assert offer_of(rollout(), 0, 0, 0, 6).unfit == "over 6 tokens"


def test_contradicting_fields_are_malformed() -> None:
    good = rollout(teacher=[-1, -1, -1])
    assert malformed_reason(good, 64) is None
    assert malformed_reason(good.model_copy(update={"loss_mask": b"\1"}), 64) == "7 tokens but 1 values in loss_mask"
    assert (
        malformed_reason(good.model_copy(update={"teacher_logprobs": b""}), 64)
        == "7 tokens but 0 values in teacher_logprobs"
    )


def test_tokens_that_the_model_cannot_compute_are_no_contradiction() -> None:
    """A client of the bridge chooses them, so they must not count towards the limits of dead letters."""
    good = rollout()
    assert untrainable_tokens(good, 64) is None
    assert untrainable_tokens(good, 12) == "token ids outside the model's vocabulary of 12"
    negative = good.model_copy(update={"token_ids": int32_bytes([3, -1, 5, 6, 10, 11, 12])})
    assert "outside the model's vocabulary" in str(untrainable_tokens(negative, 64))
    first = good.model_copy(update={"loss_mask": b"\1" * 7})
    assert untrainable_tokens(first, 64) == NOTHING_BEFORE
    empty = good.model_copy(update={"token_ids": b"", "loss_mask": b"", "sampler_logprobs": b""})
    assert untrainable_tokens(empty, 64) is None
    assert [malformed_reason(each, 12) for each in (good, negative, first, empty)] == [None] * 4


def test_a_conversation_is_anchored_at_the_base_model_unless_it_says_otherwise() -> None:
    plain = parse_config(MINIMAL, "f")
    held = anchored(plain)
    assert held.loss.kl == ANCHOR and ANCHOR.coef > 0 and ANCHOR.against == "base"
    assert held.model_copy(update={"loss": plain.loss}) == plain
    assert parse_config(given_text(held), "f") == held, "the file that `tentalis up` writes has it"
    for own in ("loss: {kl: {coef: 0.5}}", "loss: {kl: {coef: 0.0}}"):
        chosen = parse_config(f"{MINIMAL}{own}\n", "f")
        assert anchored(chosen) == chosen
    assert config_page.CONVERSATIONS in config_page.render_page() and "coef: 0.02" in config_page.CONVERSATIONS


def test_a_run_is_guarded_by_default() -> None:
    assert GuardRule.of_config(config_text(parse_config(MINIMAL, "f"))).mode is GuardMode.GUARDED


def test_segments_travel_as_json() -> None:
    part = ReadSegment(2, 5, 9, (offer_of(rollout(), 2, 7, 1, 100),))
    assert ReadSegment.from_json(part.to_json()) == part


def test_one_window_needs_no_list_and_a_wrong_one_is_told_in_words() -> None:
    of = "run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\nwindows: "
    assert parse_config(of + "22:00-06:00", "f").windows == ("22:00-06:00",)
    with pytest.raises(ConfigError, match=r"^f: windows: '25:00-06:00': there is no such time of day"):
        parse_config(of + "25:00-06:00", "f")


# The variables that the first Tentalis documents, with its defaults; where it has none, what a user would set.
DOCUMENTED = {
    "INFERENCE_BACKEND": "ollama",
    "INFERENCE_BASE_URL": "http://localhost:11434/v1",
    "INFERENCE_API_KEY": "k",
    "VLLM_LORA_NAME": "default",
    "TRAINER_BACKEND": "standalone",
    "BRIDGE_PORT": "8100",
    "OPENCLAW_GATEWAY_URL": "ws://localhost:18789",
    "INTERCEPT_ENABLED": "false",
    "INTERCEPT_PORT": "8200",
    "INTERCEPT_BACKEND_URL": "http://localhost:11434",
    "OPD_MODE": "lightweight",
    "OPD_TEACHER_MODEL": "qwen2.5:1.5b",
    "OPD_JOIN_TIMEOUT": "30.0",
    "OPD_WEIGHT": "0.3",
    "RL_WEIGHT": "0.7",
    "TRAINING_CLIP_EPSILON_HIGH": "0.28",
    "META_RL_ENABLED": "false",
    "META_RL_WINDOW_SIZE": "200",
    "META_RL_MIN_FEEDBACK": "200",
    "PRM_NUM_VOTES": "3",
    "SKILLS_ENABLED": "false",
    "SKILLS_DIR": "skills_data",
    "SKILL_EVOLUTION_THRESHOLD": "0.4",
    "SKILL_RETRIEVAL_TOP_K": "3",
    "TINKER_API_KEY": "k",
    "TINKER_BASE_URL": "https://api.tinker.thinkingmachines.ai",
    "TRAINING_SCHEDULE_ENABLED": "false",
    "TRAINING_SCHEDULE_HOURS": "02:00-06:00",
    "ALIGNMENT_ENABLED": "false",
    "ALIGNMENT_RESULTS_DIR": "alignment_results",
    "ALIGNMENT_AUDIT_ALL": "false",
    "TRAJECTORY_STORE_ENABLED": "false",
    "TRAJECTORY_STORE_PATH": "trajectory_data/trajectories.db",
    "HALUGATE_ENABLED": "false",
    "HALUGATE_MODEL": "qwen2.5:1.5b",
    "CISPO_ENABLED": "false",
    "CISPO_WEIGHT": "0.2",
    "CISPO_MARGIN": "0.5",
    "DAPO_ENTROPY_BETA": "0.01",
    "DAPO_MIN_REWARD_THRESHOLD": "0.1",
    "TRAINED_PRM_ENABLED": "false",
    "TRAINED_PRM_MODEL": "Qwen/Qwen2.5-0.5B",
    "TRAINED_PRM_CHECKPOINT": "head.pt",
    "BENCHMARK_DATASET_DIR": "benchmark_data",
    "BENCHMARK_RESULTS_DIR": "benchmark_results",
}
# Read, and by their defaults off: the features of which the other variables depend on them.
SWITCHED_OFF = {"CISPO_ENABLED", "TRAINING_SCHEDULE_ENABLED"}


@pytest.mark.parametrize(("name", "value"), DOCUMENTED.items(), ids=DOCUMENTED)
def test_every_documented_variable_of_the_first_system_is_read_or_named_with_what_replaces_it(
    name: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(DOCUMENTED) == 45
    plain = parse_config(MINIMAL, "x.yaml")
    read = parse_config(MINIMAL, "x.yaml", {name: "0.05" if name.endswith(("_WEIGHT", "_HIGH")) else value}) != plain
    named = [record.getMessage() for record in caplog.records]
    if name in ("CISPO_WEIGHT", "CISPO_MARGIN", "DAPO_ENTROPY_BETA", "TRAINING_SCHEDULE_HOURS"):
        switch = str(VARIABLE_ALIASES[name].switch)
        assert (read, named) == (False, [f"{name} is set but has no effect without {switch}"])
    elif read or name in SWITCHED_OFF:
        assert named == [] and name in VARIABLE_ALIASES
    else:
        [message] = named
        assert message.startswith(f"{name} is set but has no effect: ") and len(message.partition(": ")[2]) > 20


def test_the_first_systems_own_defaults_turn_nothing_on() -> None:
    plain, theirs = parse_config(MINIMAL, "x.yaml"), parse_config(MINIMAL, "x.yaml", DOCUMENTED)
    weights = {"rl_weight": 0.7, "opd_weight": 0.3}
    assert theirs == plain.model_copy(update={"loss": plain.loss.model_copy(update=weights)})


@pytest.mark.parametrize(
    ("variables", "setting", "value"),
    [
        ({"CISPO_ENABLED": "true"}, "loss.pair.weight", 0.2),
        ({"CISPO_ENABLED": "True", "CISPO_WEIGHT": "0.4"}, "loss.pair.weight", 0.4),
        ({"CISPO_ENABLED": "true", "CISPO_MARGIN": "0.7"}, "loss.pair.margin", 0.7),
        ({"CISPO_ENABLED": "yes", "CISPO_WEIGHT": "0.4"}, "loss.pair.weight", 0.0),
        ({"TRAINER_BACKEND": "dapo"}, "loss.kind", "dapo"),
        ({"TRAINER_BACKEND": "dapo"}, "loss.entropy_coef", 0.01),
        ({"TRAINER_BACKEND": "dapo", "DAPO_ENTROPY_BETA": "0.05"}, "loss.entropy_coef", 0.05),
        ({"TRAINER_BACKEND": "openrlhf", "DAPO_ENTROPY_BETA": "0.05"}, "loss.entropy_coef", 0.0),
        ({"TRAINING_SCHEDULE_ENABLED": "true"}, "windows", ("02:00-06:00",)),
        ({"TRAINING_SCHEDULE_ENABLED": "true", "TRAINING_SCHEDULE_HOURS": "22:00-04:00"}, "windows", ("22:00-04:00",)),
        ({"TRAINING_SCHEDULE_ENABLED": "false", "TRAINING_SCHEDULE_HOURS": "22:00-04:00"}, "windows", ()),
    ],
)
def test_a_feature_of_the_first_system_counts_only_while_its_switch_is_on(
    variables: dict[str, str], setting: str, value: object
) -> None:
    found: object = parse_config(MINIMAL, "x.yaml", variables)
    for part in setting.split("."):
        found = getattr(found, part)
    assert found == value


def test_a_file_has_the_last_word_on_what_a_switch_only_implies() -> None:
    off = parse_config(MINIMAL + "loss: {pair: {weight: 0}}\n", "x.yaml", {"CISPO_ENABLED": "true"})
    assert off.loss.pair.weight == 0
    hours = {"TRAINING_SCHEDULE_ENABLED": "true", "TRAINING_SCHEDULE_HOURS": "02:00-06:00"}
    assert parse_config(MINIMAL + "windows: 02:00-06:00\n", "x.yaml", hours).windows == ("02:00-06:00",)
    with pytest.raises(ConfigError, match="windows and TRAINING_SCHEDULE_HOURS contradict each other"):
        parse_config(MINIMAL + "windows: 03:00-06:00\n", "x.yaml", hours)


NESTED = """
run_id: r
policy: p
model: {name: Qwen/Qwen3.5-4B, checkpoint_path: /models/qwen, tokenizer_path: /models/qwen}
training:
  method: combine
  batch_size: 32
  gradient_accumulation_steps: 4
  learning_rate: 1e-6
  warmup_steps: 100
  max_steps: 10000
  ppo_clip_ratio: 0.2
  value_clip_ratio: 0.2
  gae_lambda: 0.95
  teacher_temperature: 1.0
  hint_extraction_model: gpt-4
  binary_weight: 0.5
  opd_weight: 0.25
rollout: {num_workers: 4, max_turns: 10, session_aware: true, parallel_envs: 16}
evaluation: {judge_model: gpt-4, majority_voting: true, num_judges: 3, eval_frequency: 100}
"""


def test_the_sections_of_an_openclaw_rl_file_are_understood(caplog: pytest.LogCaptureFixture) -> None:
    of = parse_config(NESTED, "x.yaml")
    assert (of.base_model, of.base_model_name) == ("/models/qwen", "Qwen3.5-4B")
    assert (of.batch_rollouts, of.steps, of.optimizer.lr, of.optimizer.warmup_steps) == (32, 10000, 1e-6, 100)
    assert (of.loss.rl_weight, of.loss.opd_weight, of.loss.clip_low, of.loss.clip_high) == (0.5, 0.25, 0.2, 0.2)
    named = {record.getMessage().split()[1] for record in caplog.records}
    assert named == {
        *("model.tokenizer_path", "training.gradient_accumulation_steps", "training.value_clip_ratio"),
        *("training.teacher_temperature", "training.hint_extraction_model"),
        *(f"rollout.{key}" for key in ("num_workers", "max_turns", "session_aware", "parallel_envs")),
        *(f"evaluation.{key}" for key in ("judge_model", "majority_voting", "num_judges", "eval_frequency")),
    }
    assert "x.yaml: evaluation.num_judges is set but has no effect: set `votes`; " in caplog.text
    alone = parse_config("run_id: r\npolicy: p\nmodel: {checkpoint_path: /models/qwen}\n", "x.yaml")
    assert (alone.base_model, alone.base_model_name) == ("/models/qwen", "qwen")
    by_name = parse_config("run_id: r\npolicy: p\nmodel: {name: org/m}\n", "x.yaml")
    assert (by_name.base_model, by_name.base_model_name) == ("org/m", "m")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "training: {lerning_rate: 1}\n",
            "x.yaml: training.lerning_rate: no such setting, did you mean learning_rate?",
        ),
        ("evaluation: {num_juges: 3}\n", "x.yaml: evaluation.num_juges: no such setting, did you mean num_judges?"),
        ("rollout: {xyzzy: 3}\n", "x.yaml: rollout.xyzzy: no such setting"),
        ("training: 3\n", "x.yaml: training: no such setting"),
        ("lr: 1\ntraining: {learning_rate: 2}\n", "lr and training.learning_rate contradict each other"),
        ("training: {learning_rate: -1}\n", "x.yaml: training.learning_rate (optimizer.lr): Input should be greater"),
        ("training: {method: both}\n", "x.yaml: training.method: binary, opd or combine, not 'both'"),
    ],
)
def test_what_is_wrong_in_a_section_is_named(lines: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(MINIMAL + lines, "x.yaml")
    assert message in str(error.value)
