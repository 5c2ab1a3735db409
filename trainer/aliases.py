"""Other names of our settings: the keys of OpenClaw-RL, verl and Tinker files, and the ancestors' variables.

A file may use any of them at its top level. A variable fills in what the file leaves open. Each stands for one setting
of ours or more; whatever contradicts it is an error, never a matter of which one wins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Alias:
    """`means` gives our settings, by dotted path, for a value; `implied` those that hold unless something else is said.
    `settings`: the paths that `means` may give. Raises ValueError for a value that says nothing."""

    settings: tuple[str, ...]
    note: str = ""
    means: Callable[[Any], Values] | None = None
    implied: Callable[[Any], Values] = field(default=lambda value: {})

    def of(self, value: Any) -> Values:
        """Our settings for a value."""
        return {self.settings[0]: value} if self.means is None else self.means(value)


def _method(value: Any) -> Values:
    match value:
        case "binary" | "rl":
            return {"loss.opd_weight": 0.0}
        case "opd":
            return {"loss.rl_weight": 0.0}
        case "combine":
            return {}
    raise ValueError(f"binary, opd or combine, not {value!r}")


def _one_name(value: Any) -> Values:
    return {"base_model_name": str(value).rstrip("/").rpartition("/")[2]}


def _twice(value: Any) -> Values:
    return {"lora.alpha": 2 * float(value)}


def _same(path: str) -> Callable[[Any], Values]:
    return lambda value: {path: value}


def _to(setting: str, note: str = "") -> Alias:
    return Alias((setting,), note)


_REFERENCE_KL = Alias(
    ("loss.kl.coef",),
    "theirs is against the model that training began with: `loss.kl.against: base`, unless that is given",
    implied=lambda value: {"loss.kl.against": "base"},
)

KEYS: Mapping[str, Alias] = {
    "method": Alias(
        ("loss.opd_weight", "loss.rl_weight"),
        "`binary` (or `rl`): no OPD part; `opd`: no RL part; `combine`: both, as weighted",
        _method,
    ),
    "binary_weight": _to("loss.rl_weight"),
    "rl_weight": _to("loss.rl_weight"),
    "w_rl": _to("loss.rl_weight"),
    "opd_weight": _to("loss.opd_weight"),
    "w_opd": _to("loss.opd_weight"),
    "adv_diff_clip": _to("loss.opd_clip"),
    "gae_lambda": _to("loss.gae.lam", "with `loss.advantage: gae`"),
    "gae_gamma": _to("loss.gae.gamma", "with `loss.advantage: gae`"),
    "entropy_coef": _to("loss.entropy_coef"),
    "kl_coef": _REFERENCE_KL,
    "kl_loss_coef": _REFERENCE_KL,
    "dual_clip": _to("loss.dual_clip"),
    "contrastive_weight": _to("loss.pair.weight"),
    "contrastive_margin": _to("loss.pair.margin"),
    "ppo_clip_ratio": Alias(
        ("loss.clip_low",), "both bounds, unless the upper one is given", implied=_same("loss.clip_high")
    ),
    "ppo_clip_ratio_low": _to("loss.clip_low"),
    "ppo_clip_ratio_high": _to("loss.clip_high"),
    "eps_clip": Alias(("loss.clip_low",), "as `ppo_clip_ratio`", implied=_same("loss.clip_high")),
    "eps_clip_high": _to("loss.clip_high"),
    "lr": _to("optimizer.lr"),
    "learning_rate": _to("optimizer.lr"),
    "weight_decay": _to("optimizer.weight_decay"),
    "max_grad_norm": _to("optimizer.grad_clip"),
    "lora_rank": _to("lora.rank"),
    "lora_alpha": _to("lora.alpha"),
    "batch_size": _to("batch_rollouts"),
    "rollout_batch_size": _to("batch_rollouts"),
    "max_context_tokens": _to("max_rollout_tokens"),
    "max_steps": _to("steps"),
}

VARIABLES: Mapping[str, Alias] = {
    "TRAINING_MODEL": Alias(("base_model",), "the name that servers know it by too", implied=_one_name),
    "TRAINING_LR": _to("optimizer.lr"),
    "TRAINING_CLIP_EPSILON": _to("loss.clip_low"),
    "TRAINING_CLIP_EPSILON_HIGH": _to("loss.clip_high"),
    "TRAINING_LORA_RANK": Alias(("lora.rank",), "with alpha = 2 rank, unless alpha is given", implied=_twice),
    "TRAINING_BATCH_SIZE": _to("batch_rollouts"),
    "TRAINING_DEVICE": _to("device"),
    "RL_WEIGHT": _to("loss.rl_weight"),
    "OPD_WEIGHT": _to("loss.opd_weight"),
    "OPENCLAW_COMBINE_W_RL": _to("loss.rl_weight"),
    "OPENCLAW_COMBINE_W_OPD": _to("loss.opd_weight"),
    "OPENCLAW_TOPK_W_RL": _to("loss.rl_weight"),
    "OPENCLAW_TOPK_W_OPD": _to("loss.opd_weight"),
    "OPENCLAW_TOPK_ADV_DIFF_CLIP": _to("loss.opd_clip"),
    "CISPO_WEIGHT": _to("loss.pair.weight", "what the first Tentalis called CISPO is a contrastive pair loss"),
    "CISPO_MARGIN": _to("loss.pair.margin"),
    "DAPO_ENTROPY_BETA": _to("loss.entropy_coef"),
}

ELSEWHERE: Mapping[str, str] = {
    "TRAINING_CHECKPOINT_DIR": "checkpoints lie below TENTALIS_HOME",
    "TRAINING_SCHEDULE_ENABLED": "training has hours if `windows` names any",
    "TRAINING_SCHEDULE_HOURS": 'say `windows: ["02:00-06:00"]` in the file; `time_zone` is UTC, as theirs was',
    "TRAINING_GROUP_SIZE": "a task says how many samples it wants: `tentalis manager --samples`",
    "TRAINING_KL_BETA": "see `loss.kl`; theirs was k1 against the base, which as a loss has no gradient on average",
    "TRAINER_BACKEND": "there is one trainer",
}
"""Variables of the ancestors that mean nothing here, and what to use instead."""
