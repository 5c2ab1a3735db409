"""Other names of our settings: the keys of OpenClaw-RL, verl and Tinker files, and the variables of earlier systems.

A file may use any of the keys at its top level, or OpenClaw-RL's sections. A variable fills in what the file leaves
open; one that belongs to a feature counts only while the feature's switch is on, as in the earlier system. Each name
stands for one or more of our settings. Names that contradict each other are an error; there is no precedence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SettingValues = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FeatureSwitch:
    """A variable that turns a feature of an earlier system on. It is off unless it has this value, in any case of
    letters."""

    variable: str
    value: str = "true"

    def on(self, variables: Mapping[str, str]) -> bool:
        """True if the variables turn the feature on."""
        return variables.get(self.variable, "").strip().lower() == self.value

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


@dataclass(frozen=True, slots=True)
class SettingAlias:
    """Another name of one or more settings. `settings`: the paths that `means` and `implied` may give. `means` maps a
    value to our settings, by dotted path; `implied` maps it to settings that hold unless they are given. `switch`: the
    feature to which a variable belongs. `otherwise`: what to do instead of a value that gives no setting. Raises
    ValueError for an invalid value."""

    settings: tuple[str, ...]
    note: str = ""
    means: Callable[[Any], SettingValues] | None = None
    implied: Callable[[Any], SettingValues] = field(default=lambda value: {})
    switch: FeatureSwitch | None = None
    otherwise: str = ""

    def settings_for(self, value: Any) -> SettingValues:
        """Returns our settings for a value."""
        return {self.settings[0]: value} if self.means is None else self.means(value)


def _method_weights(value: Any) -> SettingValues:
    match value:
        case "binary" | "rl":
            return {"loss.opd_weight": 0.0}
        case "opd":
            return {"loss.rl_weight": 0.0}
        case "combine":
            return {}
    raise ValueError(f"binary, opd or combine, not {value!r}")


def _last_part(value: Any) -> SettingValues:
    return {"base_model_name": str(value).rstrip("/").rpartition("/")[2]}


def _alpha_twice_rank(value: Any) -> SettingValues:
    return {"lora.alpha": 2 * float(value)}


def _copied_to(path: str) -> Callable[[Any], SettingValues]:
    return lambda value: {path: value}


def _nothing(value: Any) -> SettingValues:
    return {}


def _if(switch: FeatureSwitch, settings: SettingValues) -> Callable[[Any], SettingValues]:
    return lambda value: dict(settings) if switch.on({switch.variable: str(value)}) else {}


def _renamed(setting: str, note: str = "") -> SettingAlias:
    return SettingAlias((setting,), note)


def _renamed_with(switch: FeatureSwitch, setting: str, note: str = "") -> SettingAlias:
    return SettingAlias((setting,), f"with `{switch}`{note and '; '}{note}", switch=switch)


_KL_AGAINST_BASE = SettingAlias(
    ("loss.kl.coef",),
    "sets `loss.kl.against: base` unless it is given: the reference is the model that training began with",
    implied=lambda value: {"loss.kl.against": "base"},
)

KEY_ALIASES: Mapping[str, SettingAlias] = {
    "method": SettingAlias(
        ("loss.opd_weight", "loss.rl_weight"),
        "`binary` (or `rl`): no OPD part; `opd`: no RL part; `combine`: both, as weighted",
        _method_weights,
    ),
    "binary_weight": _renamed("loss.rl_weight"),
    "rl_weight": _renamed("loss.rl_weight"),
    "w_rl": _renamed("loss.rl_weight"),
    "opd_weight": _renamed("loss.opd_weight"),
    "w_opd": _renamed("loss.opd_weight"),
    "adv_diff_clip": _renamed("loss.opd_clip"),
    "gae_lambda": _renamed("loss.gae.lam", "with `loss.advantage: gae`"),
    "gae_gamma": _renamed("loss.gae.gamma", "with `loss.advantage: gae`"),
    "entropy_coef": _renamed("loss.entropy_coef"),
    "kl_coef": _KL_AGAINST_BASE,
    "kl_loss_coef": _KL_AGAINST_BASE,
    "dual_clip": _renamed("loss.dual_clip"),
    "contrastive_weight": _renamed("loss.pair.weight"),
    "contrastive_margin": _renamed("loss.pair.margin"),
    "ppo_clip_ratio": SettingAlias(
        ("loss.clip_low",), "both bounds, unless the upper one is given", implied=_copied_to("loss.clip_high")
    ),
    "ppo_clip_ratio_low": _renamed("loss.clip_low"),
    "ppo_clip_ratio_high": _renamed("loss.clip_high"),
    "eps_clip": SettingAlias(("loss.clip_low",), "as `ppo_clip_ratio`", implied=_copied_to("loss.clip_high")),
    "eps_clip_high": _renamed("loss.clip_high"),
    "lr": _renamed("optimizer.lr"),
    "learning_rate": _renamed("optimizer.lr"),
    "weight_decay": _renamed("optimizer.weight_decay"),
    "max_grad_norm": _renamed("optimizer.grad_clip"),
    "lora_rank": _renamed("lora.rank"),
    "lora_alpha": _renamed("lora.alpha"),
    "batch_size": _renamed("batch_rollouts"),
    "rollout_batch_size": _renamed("batch_rollouts"),
    "max_context_tokens": _renamed("max_rollout_tokens"),
    "max_steps": _renamed("steps"),
}

SECTION_ALIASES: Mapping[str, Mapping[str, SettingAlias]] = {
    "model": {
        "name": SettingAlias(
            ("base_model_name", "base_model"),
            "the last part of the name; the model itself, unless `checkpoint_path` names its folder",
            _last_part,
            implied=_copied_to("base_model"),
        ),
        "checkpoint_path": SettingAlias(
            ("base_model", "base_model_name"), "also the name, unless it is given", _copied_to("base_model"), _last_part
        ),
    },
    "training": {**KEY_ALIASES, "warmup_steps": _renamed("optimizer.warmup_steps")},
    "rollout": {name: KEY_ALIASES[name] for name in ("rollout_batch_size", "max_context_tokens")},
    "evaluation": {},
}
"""The sections of an OpenClaw-RL file, and the keys in each that stand for settings of ours."""

_JUDGE = "judges are defined in the file of `tentalis serve scoring --scorers`, see docs/concepts/judges.md"
_HINTERS = (
    "hinters and teachers are defined in the file of `tentalis serve hinting --hinters`, see docs/concepts/hints.md"
)
_WORKERS = "start more `tentalis worker` processes, or set their --concurrency"

IGNORED_SECTION_KEYS: Mapping[str, Mapping[str, str]] = {
    "model": {"tokenizer_path": "the tokenizer is the one in the base model's folder"},
    "training": {
        "gradient_accumulation_steps": "a step is one batch of `batch_rollouts`; `micro_batch_tokens` bounds its parts",
        "value_clip_ratio": "there is no value model",
        "teacher_temperature": "a teacher scores at the temperature at which the answer was sampled",
        "hint_extraction_model": _HINTERS,
        "n_samples_per_prompt": "each task sets its number of samples: `tentalis manager --samples`",
    },
    "rollout": {
        "num_workers": _WORKERS,
        "parallel_envs": _WORKERS,
        "max_turns": "a conversation has as many turns as its user wants",
        "session_aware": "every session is recorded as one: `tentalis serve sessions`",
    },
    "evaluation": {
        "judge_model": _JUDGE,
        "majority_voting": f"`votes` above 1 is a majority vote; {_JUDGE}",
        "num_judges": f"set `votes`; {_JUDGE}",
        "eval_frequency": "`promotion: guarded` evaluates every version before it is served, see `guard`",
    },
}
"""Keys in the sections of an OpenClaw-RL file that have no effect here, and what to use instead."""

_CISPO = FeatureSwitch("CISPO_ENABLED")
_DAPO = FeatureSwitch("TRAINER_BACKEND", "dapo")
_SCHEDULE = FeatureSwitch("TRAINING_SCHEDULE_ENABLED")

VARIABLE_ALIASES: Mapping[str, SettingAlias] = {
    "TRAINING_MODEL": SettingAlias(
        ("base_model",), "also sets `base_model_name`, to the last part of the name", implied=_last_part
    ),
    "TRAINING_LR": _renamed("optimizer.lr"),
    "TRAINING_CLIP_EPSILON": _renamed("loss.clip_low"),
    "TRAINING_CLIP_EPSILON_HIGH": _renamed("loss.clip_high"),
    "TRAINING_LORA_RANK": SettingAlias(
        ("lora.rank",), "with alpha = 2 rank, unless alpha is given", implied=_alpha_twice_rank
    ),
    "TRAINING_BATCH_SIZE": _renamed("batch_rollouts"),
    "TRAINING_DEVICE": _renamed("device"),
    "RL_WEIGHT": _renamed("loss.rl_weight"),
    "OPD_WEIGHT": _renamed("loss.opd_weight"),
    "OPENCLAW_COMBINE_W_RL": _renamed("loss.rl_weight"),
    "OPENCLAW_COMBINE_W_OPD": _renamed("loss.opd_weight"),
    "OPENCLAW_TOPK_W_RL": _renamed("loss.rl_weight"),
    "OPENCLAW_TOPK_W_OPD": _renamed("loss.opd_weight"),
    "OPENCLAW_TOPK_ADV_DIFF_CLIP": _renamed("loss.opd_clip"),
    "CISPO_ENABLED": SettingAlias(
        ("loss.pair.weight",),
        "`true`: 0.2, unless it is given; the CISPO of the first Tentalis is a contrastive pair loss",
        _nothing,
        implied=_if(_CISPO, {"loss.pair.weight": 0.2}),
    ),
    "CISPO_WEIGHT": _renamed_with(_CISPO, "loss.pair.weight"),
    "CISPO_MARGIN": _renamed_with(_CISPO, "loss.pair.margin"),
    "TRAINER_BACKEND": SettingAlias(
        ("loss.kind", "loss.entropy_coef"),
        "`dapo`: the loss `dapo`, with an entropy bonus of 0.01 unless it is given; no other value has an effect",
        _if(_DAPO, {"loss.kind": "dapo"}),
        implied=_if(_DAPO, {"loss.entropy_coef": 0.01}),
        otherwise="there is only one trainer backend",
    ),
    "DAPO_ENTROPY_BETA": _renamed_with(_DAPO, "loss.entropy_coef"),
    "TRAINING_SCHEDULE_ENABLED": SettingAlias(
        ("windows",),
        "`true`: 02:00-06:00 in `time_zone`, unless hours are given",
        _nothing,
        implied=_if(_SCHEDULE, {"windows": ["02:00-06:00"]}),
    ),
    "TRAINING_SCHEDULE_HOURS": SettingAlias(
        ("windows",),
        f"with `{_SCHEDULE}`; in `time_zone`, which is UTC, as before",
        lambda value: {"windows": [value]},
        switch=_SCHEDULE,
    ),
}

SWITCHES = frozenset(alias.switch.variable for alias in VARIABLE_ALIASES.values() if alias.switch is not None)

_GATEWAY = "start `tentalis serve gateway`, which is both the proxy and the bridge (docs/concepts/gateway.md)"
_WORKER = "`tentalis worker` reads it; the trainer calls no model server"
_META = "`tentalis serve aggregation` writes means per manager and worker; no manager is trained"
_SKILLS = "there are no skills here"
_TINKER = "training runs in `tentalis train`, on this machine"
_ALIGNMENT = "there are no alignment experiments here"
_ROLLOUTS = "every rollout is on Kafka: `tentalis rollouts list` and `query` read them"
_SCORERS = f"there is no such scorer here; {_JUDGE}"

IGNORED_VARIABLES: Mapping[str, str] = {
    "INFERENCE_BACKEND": _WORKER,
    "INFERENCE_BASE_URL": _WORKER,
    "INFERENCE_API_KEY": _WORKER,
    "VLLM_LORA_NAME": _WORKER,
    "TRAINING_CHECKPOINT_DIR": "checkpoints are below TENTALIS_HOME",
    "TRAINING_GROUP_SIZE": "each task sets its number of samples: `tentalis manager --samples`",
    "TRAINING_KL_BETA": "see `loss.kl`; this was k1 against the base, whose gradient as a loss is zero on average",
    "DAPO_MIN_REWARD_THRESHOLD": "low rewards train too; `loss.dynamic_sampling` drops groups of equal rewards",
    "BRIDGE_PORT": f"{_GATEWAY}, with --port",
    "OPENCLAW_GATEWAY_URL": "OpenClaw calls the gateway: see config/openclaw/README.md",
    "INTERCEPT_ENABLED": _GATEWAY,
    "INTERCEPT_PORT": f"{_GATEWAY}, with --port",
    "INTERCEPT_BACKEND_URL": f"{_GATEWAY}, with --server",
    "OPD_MODE": _HINTERS,
    "OPD_TEACHER_MODEL": _HINTERS,
    "OPD_JOIN_TIMEOUT": "a task waits for a hint as long as its terms say (`opd_window_ms`), see docs/concepts/join.md",
    "META_RL_ENABLED": _META,
    "META_RL_WINDOW_SIZE": _META,
    "META_RL_MIN_FEEDBACK": _META,
    "PRM_NUM_VOTES": f"set `votes`; {_JUDGE}",
    "SKILLS_ENABLED": _SKILLS,
    "SKILLS_DIR": _SKILLS,
    "SKILL_EVOLUTION_THRESHOLD": _SKILLS,
    "SKILL_RETRIEVAL_TOP_K": _SKILLS,
    "TINKER_API_KEY": _TINKER,
    "TINKER_BASE_URL": _TINKER,
    "ALIGNMENT_ENABLED": _ALIGNMENT,
    "ALIGNMENT_RESULTS_DIR": _ALIGNMENT,
    "ALIGNMENT_AUDIT_ALL": "every record stays on its Kafka topic: `tentalis consume` reads it",
    "TRAJECTORY_STORE_ENABLED": _ROLLOUTS,
    "TRAJECTORY_STORE_PATH": _ROLLOUTS,
    "HALUGATE_ENABLED": _SCORERS,
    "HALUGATE_MODEL": _SCORERS,
    "TRAINED_PRM_ENABLED": _SCORERS,
    "TRAINED_PRM_MODEL": _SCORERS,
    "TRAINED_PRM_CHECKPOINT": _SCORERS,
    "BENCHMARK_DATASET_DIR": "`TENTALIS_DATA` names the folder of data sets such as GSM8K",
    "BENCHMARK_RESULTS_DIR": "there are no benchmarks here; the demo's report is below TENTALIS_HOME",
}
"""Variables of earlier systems that have no effect here, and what to use instead."""
