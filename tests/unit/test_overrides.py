"""Settings given one by one."""

import pytest

from tentalis.overrides import BadOverride, with_overrides


def test_values_are_yaml_and_the_original_stays() -> None:
    config = {"seed": 0, "loss": {"rl_weight": 1.0, "kind": "clipped"}}
    given = ["seed=7", "loss.rl_weight=0", "optimizer.betas=[0.9, 0.95]", "loss.kind=null"]
    assert with_overrides(config, given) == {
        "seed": 7,
        "loss": {"rl_weight": 0, "kind": None},
        "optimizer": {"betas": [0.9, 0.95]},
    }
    assert config == {"seed": 0, "loss": {"rl_weight": 1.0, "kind": "clipped"}}


@pytest.mark.parametrize("text", ["seed", "=1", "loss.=1", ".seed=1", "seed.low=1", "seed=[1"])
def test_what_is_no_setting_is_quoted(text: str) -> None:
    with pytest.raises(BadOverride, match="`" + text.replace("[", r"\[").replace(".", r"\.")):
        with_overrides({"seed": 0}, [text])
