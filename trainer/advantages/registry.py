"""Advantage estimators by their name in the configuration."""

from trainer.advantages.group import binary, group_mean, group_mean_std, leave_one_out, reward
from trainer.advantages.rewarded_sample import Estimator
from trainer.advantages.session import gae
from trainer.advantages.steps import stepwise
from trainer.config.loss import AdvantageName

ESTIMATORS: dict[AdvantageName, Estimator] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
    "dr_grpo": group_mean,
    "reward": reward,
    "binary": binary,
    "stepwise": stepwise,
    "gae": gae,
}
