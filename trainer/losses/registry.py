"""Policy losses by their name in the configuration."""

from trainer.config.loss import LossKind
from trainer.losses.cispo import cispo
from trainer.losses.clipped import clipped
from trainer.losses.dapo import dapo
from trainer.losses.gspo import gspo
from trainer.losses.masked import masked
from trainer.losses.tokens import PolicyLoss
from trainer.losses.truncated_is import truncated_is

POLICY_LOSSES: dict[LossKind, PolicyLoss] = {
    "clipped": clipped,
    "dapo": dapo,
    "cispo": cispo,
    "gspo": gspo,
    "masked": masked,
    "truncated_is": truncated_is,
}
