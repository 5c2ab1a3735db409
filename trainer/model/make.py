"""Makes the policy that a configuration describes: with an adapter, or fully trained."""

from pathlib import Path

import torch

from trainer.config.trainer_config import TrainerConfig
from trainer.model.full import FullPolicy
from trainer.model.model import LoraPolicy
from trainer.model.policy import TrainedPolicy


def make_policy(config: TrainerConfig, folder: Path, device: str, base_dtype: torch.dtype) -> TrainedPolicy:
    """Returns the policy of a configuration on the base model in a folder. Raises UntrainableModel, BadTargets."""
    if config.lora is None:
        kl = config.loss.kl
        return FullPolicy(folder, device, with_base=kl.coef > 0 and kl.against == "base")
    return LoraPolicy(folder, config.base_model_name, config.lora, config.seed, device, base_dtype)
