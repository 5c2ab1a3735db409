"""Learning rates by step."""

from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config.trainer_config import OptimizerConfig
from trainer.step.schedule import learning_rate


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"schedule": "linear", "decay_steps": 4}, [0.75, 0.5, 0.25, 0, 0, 0, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "decay_steps": 4}, [0.5, 1, 0.5, 0, 0, 0, 0]),
        (
            {"schedule": "linear", "warmup_steps": 1, "decay_steps": 5, "final_lr_fraction": 0.2},
            [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2],
        ),
        ({"schedule": "cosine", "warmup_steps": 2, "decay_steps": 6}, [0.5, 1, 0.853553, 0.5, 0.146447, 0, 0]),
        (
            {"schedule": "cosine", "decay_steps": 2, "final_lr_fraction": 0.5},
            [0.75, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        ),
    ],
)
def test_rates_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    rates = [learning_rate(step, OptimizerConfig(lr=1.0, **options)) for step in range(1, 8)]
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("decay", [None, 3])
def test_a_decay_without_room_is_refused(decay: int | None) -> None:
    with pytest.raises(ValidationError, match="needs decay_steps, more than warmup_steps"):
        OptimizerConfig(schedule="cosine", warmup_steps=3, decay_steps=decay)
