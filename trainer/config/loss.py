"""The `loss` part of a run's configuration. Imports no torch, because the command line reads it."""

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainer.config.config_model import ConfigModel, NotNegative, Positive

LossKind = Literal["clipped", "dapo", "cispo", "gspo", "masked", "truncated_is"]
AdvantageName = Literal[
    "group_mean", "group_mean_std", "leave_one_out", "dr_grpo", "reward", "binary", "stepwise", "gae"
]
Aggregation = Literal["auto", "token_mean", "sequence_mean", "sequence_sum"]

PAIR_ALIASES = {"tentalis_cispo": "contrastive_pair"}
"""Other names of pair losses. The loss that the first Tentalis called CISPO is a contrastive pair loss, not MiniMax's
CISPO."""


class ImportanceConfig(ConfigModel):
    """Truncated importance sampling (`kind: truncated_is`)."""

    level: Literal["token", "sequence"] = "token"
    """The ratio that becomes the weight: each token's, or the product over its sequence."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight outside [low, high]: truncate to the bound, or mask the token (sequence)."""
    low: NotNegative = 0.0
    """Lower bound of the weight."""
    high: Positive = 2.0
    """Upper bound of the weight."""


class GaeConfig(ConfigModel):
    """Generalised advantage estimation over the turns of a session (`advantage: gae`)."""

    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount from one point in time to the next."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Lambda: the decay of credit over earlier points in time."""
    rewards: Literal["turn", "step"] = "turn"
    """A point in time is a turn, or a scored step within a turn (the turn's reward then belongs to its last step)."""
    values: Literal["zero", "position"] = "zero"
    """Value of a state: 0, or the mean return of the batch's other sessions at the same position."""


class OverlongConfig(ConfigModel):
    """Soft punishment of long answers (DAPO)."""

    length: Annotated[int, Field(ge=1)] | None = None
    """Longest answer in tokens; null: off."""
    buffer: Annotated[int, Field(ge=1)] = 256
    """From length - buffer on the reward falls linearly, by up to factor at `length`."""
    factor: NotNegative = 1.0
    """The punishment at `length`."""
    filter: bool = False
    """Leave the RL part of answers of `length` tokens or more out, instead of punishing them."""

    @model_validator(mode="after")
    def _buffer_within_length(self) -> "OverlongConfig":
        if self.length is not None and not self.filter and self.buffer > self.length:
            raise ValueError(f"buffer {self.buffer} is longer than length {self.length}, the longest answer")
        if self.filter and self.length is None:
            raise ValueError("filter needs length, the longest answer in tokens")
        return self


class TopKConfig(ConfigModel):
    """Distillation over the most likely tokens of teacher and student (`opd_kind: topk`)."""

    k: Annotated[int, Field(ge=1, le=64)] = 4
    """Number of most likely tokens of the student, and of the teacher, that are compared."""
    choice: Literal["sequence", "token", "shortest"] = "sequence"
    """The hint that teaches where there are several: the one whose most likely tokens are most often the student's,
    over the whole sequence or at each token; or the shortest hint."""
    support: Literal["student", "teacher", "overlap"] = "student"
    """Tokens of the comparison: the student's most likely, the teacher's, or those in both."""
    tail: bool = True
    """Count everything outside the support as one more outcome, so that probabilities add up to 1."""


class KlConfig(ConfigModel):
    """A penalty on the divergence from a reference."""

    coef: NotNegative = 0.0
    """Weight of the penalty; 0: off."""
    kind: Literal["k1", "k2", "k3"] = "k2"
    """Estimator (formulas: docs/concepts/losses.md). Only k2 has the gradient of the reverse KL; the gradient of k1 is
    zero on average."""
    against: Literal["sampler", "base"] = "sampler"
    """The reference: the policy that sampled, or the base model without adapter (one more forward pass)."""


def _resolve_pair_alias(name: object) -> object:
    return PAIR_ALIASES.get(name, name) if isinstance(name, str) else name


class PairLossConfig(ConfigModel):
    """A contrastive loss on pairs of a better and a worse answer to the same task."""

    weight: NotNegative = 0.0
    """Weight of the part; 0: off."""
    kind: Annotated[Literal["contrastive_pair", "infonce_pair"], BeforeValidator(_resolve_pair_alias)] = (
        "contrastive_pair"
    )
    """Hinge with a margin (also known as `tentalis_cispo`), or the softmax of the pair."""
    threshold: float = 0.2
    """Answers with at least this reward are better than those with less."""
    margin: Positive = 0.5
    """The hinge wants the better answer's mean log-prob per token to exceed the worse one's by this."""
    temperature: Positive = 0.07
    """Temperature of the softmax."""


class LossConfig(ConfigModel):
    """The minimised sum: rl_weight * RL / N_rl + opd_weight * OPD / N_opd, and parts that are off by default."""

    kind: LossKind = "clipped"
    """The policy loss."""
    advantage: AdvantageName = "group_mean"
    """Estimator that turns rewards into advantages."""
    baseline_decay: Annotated[float, Field(ge=0.0, lt=1.0)] | None = 0.9
    """Of an answer without a group, such as a turn of a conversation, the estimators of groups take the reward less the
    mean reward of such answers in earlier steps. The weight of a step is multiplied by this at each further step. null:
    the reward itself. It has no effect on reward, binary, stepwise and gae."""
    aggregate: Aggregation = "auto"
    """Weight of a token in the RL part. token_mean: equal for all tokens; sequence_mean: the mean over each answer,
    then over answers; sequence_sum: the sum over each answer divided by aggregate_length, then the mean over answers.
    auto: sequence_mean for gspo, sequence_sum for dr_grpo, else token_mean."""
    aggregate_length: Annotated[int, Field(ge=1)] | None = None
    """The divisor of sequence_sum: the longest answer in tokens."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Lower bound of the ratio is 1 - clip_low (clipped, dapo, and the distillation part)."""
    clip_high: Positive = 0.28
    """Upper bound of the ratio is 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """With a negative advantage the loss of a token is at most dual_clip * |advantage|, so that a single off-policy
    token does not turn the whole gradient; null: unbounded."""
    log_ratio_clamp: Positive = 10.0
    """|log pi - log mu| is clamped to this before the exponential, so that no ratio overflows."""
    cispo_low: NotNegative = 0.0
    """Smallest weight of a token (cispo)."""
    cispo_high: Positive = 4.0
    """Largest weight of a token (cispo)."""
    gspo_low: Positive = 3e-4
    """Lower bound of the sequence's ratio is 1 - gspo_low (gspo)."""
    gspo_high: Positive = 4e-4
    """Upper bound of the sequence's ratio is 1 + gspo_high (gspo)."""
    mask_low: Positive = 0.2
    """A token with a negative advantage is left out if its probability fell by more than this (masked)."""
    mask_high: Positive = 0.2
    """A token with a positive advantage is left out if its probability rose by more than this (masked)."""
    mask_kl: NotNegative = 1e-3
    """Weight of the squared log-ratio that keeps all tokens near the sampler (masked)."""
    importance: ImportanceConfig = ImportanceConfig()
    gae: GaeConfig = GaeConfig()
    dynamic_sampling: bool | None = None
    """Drop the RL part of groups of equal rewards when a batch is planned; null: only with dapo."""
    max_equal_batches: Annotated[int, Field(ge=1)] = 10
    """Batches without anything to learn, times 1 + max_staleness, after which the manager gives the run up (groups of
    equal rewards with dynamic_sampling, no hints for the distillation part alone, answers without any)."""
    overlong: OverlongConfig = OverlongConfig()
    step_coef: NotNegative | None = None
    """Weight of step scores, added to the reward: each step's own score (stepwise, gae over steps), else their mean.
    null: 1 for stepwise and gae over steps, else 0."""
    rl_weight: NotNegative = 1.0
    """Weight of the RL part."""
    opd_weight: NotNegative = 1.0
    """Weight of the distillation part."""
    opd_kind: Literal["token", "topk"] = "token"
    """Distillation on the student's own tokens, or over the most likely ones (the hinting app must ask the teacher for
    them)."""
    opd_clip: Positive = 1.0
    """log teacher - log student is clipped to +- this value."""
    topk: TopKConfig = TopKConfig()
    kl: KlConfig = KlConfig()
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus; 0: off."""
    pair: PairLossConfig = PairLossConfig()

    @model_validator(mode="after")
    def _length_for_the_constant(self) -> "LossConfig":
        if self.weighting == "sequence_sum" and self.aggregate_length is None:
            raise ValueError(
                "sequence_sum needs aggregate_length: the longest answer in tokens, by which sums are divided"
            )
        if not math.isfinite(self.pair.threshold):
            raise ValueError("pair.threshold must be finite")
        return self

    @property
    def weighting(self) -> Literal["token_mean", "sequence_mean", "sequence_sum"]:
        """`aggregate` with auto resolved."""
        if self.aggregate != "auto":
            return self.aggregate
        if self.kind == "gspo":
            return "sequence_mean"
        return "sequence_sum" if self.advantage == "dr_grpo" else "token_mean"

    @property
    def drops_equal_rewards(self) -> bool:
        """`dynamic_sampling` with null resolved."""
        return self.kind == "dapo" if self.dynamic_sampling is None else self.dynamic_sampling

    @property
    def distils(self) -> bool:
        """True if the distillation part trains: hints and the teacher's log-probs are read."""
        return self.opd_weight > 0

    @property
    def distils_alone(self) -> bool:
        """True if only the distillation part trains: an answer without a hint is not read."""
        return self.distils and self.rl_weight == 0 and self.pair.weight == 0

    @property
    def by_steps(self) -> bool:
        """True if advantages belong to steps, not to whole answers."""
        return self.advantage == "stepwise" or (self.advantage == "gae" and self.gae.rewards == "step")

    @property
    def step_weight(self) -> float:
        """`step_coef` with null resolved."""
        return float(self.by_steps) if self.step_coef is None else self.step_coef

    @property
    def compares_groups(self) -> bool:
        """True if an advantage is a difference to the other samples of the group."""
        return self.advantage not in ("reward", "binary", "gae")
