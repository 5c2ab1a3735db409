"""The learning rate of a step. Pure: a function of the step's number in the run and the configuration."""

import math

from trainer.config.trainer_config import OptimizerConfig


def learning_rate(step: int, options: OptimizerConfig) -> float:
    """Returns the rate of step 1, 2, ... of a run.

    During the warm-up: lr * step / warmup_steps. Then, with x from 0 at its last step to 1 at decay_steps and f the
    final fraction: lr (constant), lr * (1 - (1 - f) x) (linear) or lr * (f + (1 - f) (1 + cos(pi x)) / 2) (cosine).
    Example: with lr 1, warmup_steps 2, decay_steps 4, linear and f 0: 0.5, 1, 0.5, 0, 0, ...
    """
    if step < options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.schedule == "constant" or options.decay_steps is None:
        return options.lr
    progress = min(1.0, (step - options.warmup_steps) / (options.decay_steps - options.warmup_steps))
    remaining = 1.0 - progress if options.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return options.lr * (options.final_lr_fraction + (1.0 - options.final_lr_fraction) * remaining)
