"""Estimators of advantages by the name that the configuration gives them."""

from trainer.advantages.graded import Estimator
from trainer.advantages.group import binary, group_mean, group_mean_std, leave_one_out, reward
from trainer.advantages.session import gae
from trainer.advantages.steps import stepwise
from trainer.losses.settings import Advantage

ESTIMATORS: dict[Advantage, Estimator] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
    "dr_grpo": group_mean,
    "reward": reward,
    "binary": binary,
    "stepwise": stepwise,
    "gae": gae,
}
