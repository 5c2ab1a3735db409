"""Settings of a run that `tentalis up` begins, where they differ from the defaults: its rollouts are conversations."""

from trainer.config.loss import KlConfig
from trainer.config.trainer_config import TrainerConfig

ANCHOR = KlConfig(coef=0.02, kind="k2", against="base")
"""A small penalty on the divergence from the base model. Rewards of conversations are noisy and easy to please, and no
rule bounds how far a policy follows them."""


def anchored(config: TrainerConfig) -> TrainerConfig:
    """Returns the configuration with the anchor, unless it sets `loss.kl`."""
    if "kl" in config.loss.model_fields_set:
        return config
    return config.model_copy(update={"loss": config.loss.model_copy(update={"kl": ANCHOR})})
