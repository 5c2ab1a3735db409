"""The `loss` part of a run's configuration. Imports no torch: the command line reads it."""

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from trainer.part import NotNegative, Part, Positive

Kind = Literal["clipped", "dapo", "cispo", "gspo", "masked", "truncated_is"]
Advantage = Literal["group_mean", "group_mean_std", "leave_one_out", "dr_grpo", "reward", "binary", "stepwise", "gae"]
Aggregate = Literal["auto", "token_mean", "sequence_mean", "sequence_sum"]

PAIR_ALIASES = {"tentalis_cispo": "contrastive_pair"}
"""Other names of pair losses. What the first Tentalis called CISPO is a contrastive pair loss, not MiniMax's CISPO."""


class Importance(Part):
    """Truncated importance sampling (`kind: truncated_is`)."""

    level: Literal["token", "sequence"] = "token"
    """Whose ratio is the weight: each token's, or the product over its sequence."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight outside [low, high]: it is set to the bound, or the token (sequence) gets none."""
    low: NotNegative = 0.0
    """Lower bound of the weight."""
    high: Positive = 2.0
    """Upper bound of the weight."""


class Gae(Part):
    """Generalised advantages over the turns of a session (`advantage: gae`)."""

    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount from one point in time to the next."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Lambda: how far credit reaches back."""
    rewards: Literal["turn", "step"] = "turn"
    """A point in time is a turn, or a scored step within a turn (the turn's reward then comes with its last step)."""
    values: Literal["zero", "position"] = "zero"
    """Value of a state: 0, or the mean return that the batch's other sessions have at the same position."""


class Overlong(Part):
    """Soft punishment of long answers (DAPO)."""

    length: Annotated[int, Field(ge=1)] | None = None
    """Longest answer in tokens; null: off."""
    buffer: Annotated[int, Field(ge=1)] = 256
    """From length - buffer on the reward sinks, linearly, down to -factor at `length`."""
    factor: NotNegative = 1.0
    """The punishment at `length`."""
    filter: bool = False
    """Leave the RL part of answers of `length` tokens or more out altogether, instead of punishing them."""

    @model_validator(mode="after")
    def _buffer_within_length(self) -> "Overlong":
        if self.length is not None and not self.filter and self.buffer > self.length:
            raise ValueError(f"buffer {self.buffer} is longer than the longest answer, {self.length}")
        if self.filter and self.length is None:
            raise ValueError("filter needs length, the longest answer in tokens")
        return self


class TopK(Part):
    """Distillation over the teacher's and the student's likeliest tokens (`opd_kind: topk`)."""

    k: Annotated[int, Field(ge=1, le=64)] = 4
    """Likeliest tokens of the student, and of the teacher, that are compared."""
    choice: Literal["sequence", "token", "shortest"] = "sequence"
    """Which hint teaches where there are several: the one whose likeliest tokens are most often the student's over the
    whole sequence, or at each token; or the shortest hint."""
    support: Literal["student", "teacher", "overlap"] = "student"
    """Tokens of the comparison: the student's likeliest, the teacher's, or those in both."""
    tail: bool = True
    """Whether everything outside the support is one more outcome, so that probabilities add up to 1."""


class Kl(Part):
    """A penalty on the divergence from a reference."""

    coef: NotNegative = 0.0
    """Weight of the penalty; 0: off."""
    kind: Literal["k1", "k2", "k3"] = "k2"
    """Estimator (see losses/kl.py). Only k2 has the gradient of the reverse KL; k1 has none on average."""
    against: Literal["sampler", "base"] = "sampler"
    """The reference: the policy that sampled, or the base model without adapter (one more forward pass)."""


def _named_pair(name: object) -> object:
    return PAIR_ALIASES.get(name, name) if isinstance(name, str) else name


class Pair(Part):
    """A contrastive loss on pairs of a better and a worse answer to the same task."""

    weight: NotNegative = 0.0
    """Weight of the part; 0: off."""
    kind: Annotated[Literal["contrastive_pair", "infonce_pair"], BeforeValidator(_named_pair)] = "contrastive_pair"
    """Hinge with a margin (also known as `tentalis_cispo`), or the softmax of the pair."""
    threshold: float = 0.2
    """Answers with at least this reward are better than those with less."""
    margin: Positive = 0.5
    """The hinge wants the better answer's mean log-prob per token to be above the worse one's by this."""
    temperature: Positive = 0.07
    """Of the softmax."""


class Loss(Part):
    """What is minimised: rl_weight * RL / N_rl + opd_weight * OPD / N_opd, and the parts that are off by default."""

    kind: Kind = "clipped"
    """The policy loss."""
    advantage: Advantage = "group_mean"
    """How rewards become advantages."""
    aggregate: Aggregate = "auto"
    """Weight of a token in the RL part: token_mean: each the same; sequence_mean: the mean over each answer, then over
    answers; sequence_sum: the sum over each answer divided by aggregate_length, then the mean over answers. auto:
    sequence_mean for gspo, sequence_sum for dr_grpo, else token_mean."""
    aggregate_length: Annotated[int, Field(ge=1)] | None = None
    """The constant of sequence_sum: the longest answer in tokens."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The ratio is clipped at 1 - clip_low from below (clipped, dapo, and the distillation part)."""
    clip_high: Positive = 0.28
    """The ratio is clipped at 1 + clip_high from above."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """With a negative advantage the loss of a token is at most -dual_clip times it (3 is usual); null: unbounded."""
    log_ratio_clamp: Positive = 10.0
    """|log pi - log mu| is cut here before the exponential, so that no ratio overflows."""
    cispo_low: NotNegative = 0.0
    """Least weight of a token (cispo)."""
    cispo_high: Positive = 4.0
    """Largest weight of a token (cispo)."""
    gspo_low: Positive = 3e-4
    """The sequence's ratio is clipped at 1 - gspo_low from below (gspo)."""
    gspo_high: Positive = 4e-4
    """The sequence's ratio is clipped at 1 + gspo_high from above (gspo)."""
    mask_low: Positive = 0.2
    """A token with a negative advantage is left out when its probability fell by more than this (masked)."""
    mask_high: Positive = 0.2
    """A token with a positive advantage is left out when its probability rose by more than this (masked)."""
    mask_kl: NotNegative = 1e-3
    """Weight of the squared log-ratio that holds all tokens near the sampler (masked)."""
    importance: Importance = Importance()
    gae: Gae = Gae()
    dynamic_sampling: bool | None = None
    """Drop the RL part of groups whose rewards are all equal, when a batch is planned; null: with dapo only."""
    overlong: Overlong = Overlong()
    step_coef: NotNegative | None = None
    """Weight of the scores of steps beside the reward: of each step's own (stepwise, gae over steps), else of their
    mean. null: 1 for stepwise and gae over steps, else 0."""
    rl_weight: NotNegative = 1.0
    """Weight of the RL part."""
    opd_weight: NotNegative = 1.0
    """Weight of the distillation part."""
    opd_kind: Literal["token", "topk"] = "token"
    """Distillation on the student's own tokens, or over the likeliest ones (the teacher must have been asked)."""
    opd_clip: Positive = 1.0
    """log teacher - log student is clipped to +- this."""
    topk: TopK = TopK()
    kl: Kl = Kl()
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus; 0: off."""
    pair: Pair = Pair()

    @model_validator(mode="after")
    def _length_for_the_constant(self) -> "Loss":
        if self.weighting == "sequence_sum" and self.aggregate_length is None:
            raise ValueError("aggregate_length is needed: the longest answer in tokens, by which sums are divided")
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
    def by_steps(self) -> bool:
        """Whether advantages belong to steps and not to whole answers."""
        return self.advantage == "stepwise" or (self.advantage == "gae" and self.gae.rewards == "step")

    @property
    def step_weight(self) -> float:
        """`step_coef` with null resolved."""
        return float(self.by_steps) if self.step_coef is None else self.step_coef

    @property
    def compares_groups(self) -> bool:
        """Whether an advantage is a difference to the other samples of the group."""
        return self.advantage not in ("reward", "binary", "gae")
