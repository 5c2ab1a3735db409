"""Advantages against hand-computed values; what is not in the batch; shaping."""

from typing import Any, get_args

import pytest

from schemas.group_statistics import mean_and_std
from trainer.advantages.batch import estimate_advantages
from trainer.advantages.registry import ESTIMATORS
from trainer.advantages.rewarded_sample import AdvantageSpans, RewardedSample, overlong_penalty
from trainer.config.loss import AdvantageName, LossConfig


def group(rewards: list[float], name: str = "t", **more: Any) -> list[RewardedSample]:
    mean, std = mean_and_std(rewards)
    values = {"session_id": None, "turn_index": None, "n_tokens": 10, "n_answer": 6, "steps": ()}
    values |= {"group_id": name, "n_requested": len(rewards), "n_rewarded": len(rewards)}
    values |= {"group_mean": mean, "group_std": std} | more
    return [RewardedSample(rollout_id=f"{name}/{i}", reward=reward, **values) for i, reward in enumerate(rewards)]


def values(samples: list[RewardedSample], **settings: Any) -> list[float | None]:
    found = estimate_advantages(samples, LossConfig(**settings)).by_rollout
    assert all(len(spans) == 1 and spans[0][:2] == (0, 10) for spans in found.values())
    return [found[s.rollout_id][0][2] if s.rollout_id in found else None for s in samples]


def test_the_registry_has_every_name_of_the_configuration() -> None:
    assert tuple(ESTIMATORS) == get_args(AdvantageName)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_mean", [0.5, -0.5, -0.5, 0.5]),
        ("group_mean_std", [1.0, -1.0, -1.0, 1.0]),
        ("leave_one_out", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5]),
        ("reward", [1.0, 0.0, 0.0, 1.0]),
        ("binary", [1.0, None, None, 1.0]),
        ("gae", [1.0, 0.0, 0.0, 1.0]),
        ("stepwise", [1.0, -1.0, -1.0, 1.0]),
    ],
)
def test_group_advantages(name: AdvantageName, expected: list[float | None]) -> None:
    found = values(group([1.0, 0.0, 0.0, 1.0]), advantage=name, aggregate_length=10)
    assert found == pytest.approx(expected, abs=3e-4)


@pytest.mark.parametrize("name", ["group_mean", "group_mean_std", "leave_one_out", "dr_grpo"])
def test_equal_rewards_say_nothing(name: AdvantageName) -> None:
    for equal in (1.0, 0.7):  # the mean of three times 0.7 is not 0.7 in floating point
        assert values(group([equal] * 3), advantage=name, aggregate_length=10) == [0.0, 0.0, 0.0]


def test_dynamic_sampling_leaves_groups_of_equal_rewards_out_of_loss_and_count() -> None:
    both = [*group([0.7, 0.7, 0.7]), *group([1.0, 0.0], "u"), *group([0.7], "v")]
    assert values(both, kind="dapo") == [None, None, None, 0.5, -0.5, 0.7]
    assert values(both, dynamic_sampling=True) == [None, None, None, 0.5, -0.5, 0.7]
    assert values(both, kind="dapo", dynamic_sampling=False)[0] == 0.0


def test_a_conversation_has_its_reward_and_a_lone_survivor_of_a_group_has_nothing() -> None:
    for name in ("group_mean", "group_mean_std", "leave_one_out"):
        assert values(group([-0.3]), advantage=name) == [-0.3]
        assert values(group([-0.3], n_requested=8), advantage=name) == [None]


def test_overlong_shaping() -> None:
    assert overlong_penalty(18432, 20480, 4096, 1.0) == -0.5
    assert overlong_penalty(16384, 20480, 4096, 1.0) == overlong_penalty(3, 20480, 4096, 1.0) == 0.0
    assert overlong_penalty(30000, 20480, 4096, 1.0) == -1.0


def test_a_punished_reward_is_compared_with_the_punished_rewards_of_the_batch() -> None:
    samples = group([1.0, 1.0, 0.0])
    samples[1] = RewardedSample(**(_fields(samples[1]) | {"n_answer": 8}))
    shaped = {"overlong": {"length": 10, "buffer": 4}}
    assert values(samples, **shaped) == pytest.approx([0.5, 0.0, -0.5])
    part = estimate_advantages(samples[:2], LossConfig(**shaped))
    assert part.by_rollout["t/0"][0][2] == pytest.approx(0.25)
    assert part.metrics["group_absent"] == 1.0
    assert estimate_advantages(samples[:1], LossConfig(**shaped)).by_rollout == {}
    assert estimate_advantages(samples, LossConfig(**shaped)).metrics["group_absent"] == 0.0
    assert values(samples, overlong={"length": 8, "filter": True}) == pytest.approx([1 / 3, None, -2 / 3])


def _fields(sample: RewardedSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in RewardedSample.__dataclass_fields__}


def test_the_mean_score_of_steps_is_part_of_the_reward_if_asked_for() -> None:
    samples = [
        RewardedSample(**(_fields(sample) | {"steps": ((4, 7, score), (7, 10, score))}))
        for sample, score in zip(group([0.5, 0.5]), (1.0, -1.0), strict=True)
    ]
    assert values(samples) == [0.0, 0.0]
    assert values(samples, step_coef=0.5) == [0.5, -0.5]


def stepped(rewards: list[float], scores: list[list[float]], **more: Any) -> list[RewardedSample]:
    return [
        RewardedSample(**(_fields(sample) | {"steps": tuple((4 + i, 5 + i, each) for i, each in enumerate(own))}))
        for sample, own in zip(group(rewards, **more), scores, strict=True)
    ]


def test_stepwise_compares_a_step_with_the_same_step_of_the_others() -> None:
    samples = stepped([0.0, 0.0, 0.0], [[1.0, 0.0, 5.0], [0.0, 0.0], [-1.0, 0.0]])
    found = estimate_advantages(samples, LossConfig(advantage="stepwise"))
    size = (2 / 3) ** 0.5
    # The second step is equal for all, the third only one reached: neither says anything.
    expected: dict[str, AdvantageSpans] = {
        "t/0": ((4, 5, pytest.approx(1.0 / (size + 1e-4))),),
        "t/1": ((4, 5, 0.0),),
        "t/2": ((4, 5, pytest.approx(-1.0 / (size + 1e-4))),),
    }
    assert found.by_rollout == expected
    with_outcome = estimate_advantages(stepped([1.0, -1.0], [[0.0], [2.0]]), LossConfig(advantage="stepwise"))
    assert with_outcome.by_rollout == {}, "reward and score cancel"
    alone = estimate_advantages(stepped([0.5], [[1.0, 0.0]]), LossConfig(advantage="stepwise", step_coef=0.5))
    assert alone.by_rollout == {"t/0": ((4, 5, 1.0), (5, 6, 0.5))}
    assert estimate_advantages(samples[:2], LossConfig(advantage="stepwise")).metrics["group_absent"] == 1.0


def session(rewards: list[tuple[int, float]], name: str = "s") -> list[RewardedSample]:
    return [sample for turn, r in rewards for sample in group([r], f"{name}{turn}", session_id=name, turn_index=turn)]


def test_credit_reaches_back_over_the_turns_of_a_session() -> None:
    turns = session([(0, 0.0), (1, 0.0), (2, 1.0)])
    assert values(turns, advantage="gae", gae={"lam": 0.5}) == [0.25, 0.5, 1.0]
    assert values(turns, advantage="gae", gae={"lam": 0.5, "gamma": 0.5}) == [0.0625, 0.25, 1.0]
    assert values(turns[::-1], advantage="gae", gae={"lam": 0.5}) == [1.0, 0.5, 0.25]
    others = [*turns, *session([(0, -1.0)], "other"), *group([0.3], "none")]
    assert values(others, advantage="gae", gae={"lam": 0.5}) == [0.25, 0.5, 1.0, -1.0, 0.3]


def test_credit_does_not_pass_over_a_turn_that_is_not_in_the_batch() -> None:
    turns = session([(0, 0.0), (1, 0.5), (3, 1.0)])
    found = estimate_advantages(turns, LossConfig(advantage="gae", gae={"lam": 1.0}))
    assert [found.by_rollout[t.rollout_id][0][2] for t in turns] == [0.5, 0.5, 1.0]
    assert found.metrics["session_gaps"] == 1.0
    assert estimate_advantages(turns[1:], LossConfig(advantage="gae")).metrics["session_gaps"] == 2.0


def test_several_samples_of_a_turn_continue_what_precedes_them_with_their_mean() -> None:
    samples = [*session([(0, 0.0)]), *group([1.0, 0.0], "x", session_id="s", turn_index=1)]
    assert values(samples, advantage="gae", gae={"lam": 1.0}) == [0.5, 1.0, 0.0]


def test_points_in_time_can_be_steps() -> None:
    samples = stepped([1.0], [[0.0, 0.5]], session_id="s", turn_index=0)
    loss_config = LossConfig(advantage="gae", gae={"lam": 0.5, "rewards": "step"})
    assert estimate_advantages(samples, loss_config).by_rollout == {"t/0": ((4, 5, 0.75), (5, 6, 1.5))}


def test_values_by_position_never_contain_the_answer_that_they_judge() -> None:
    two = [*session([(0, 0.0), (1, 1.0)]), *session([(0, 0.5)], "u")]
    # V_0 of s is u's return 0.5, V_1 of s is 0 (no other session is that long); V_0 of u is s's return 1.
    loss = {"advantage": "gae", "gae": {"lam": 1.0, "values": "position"}}
    assert values(two, **loss) == pytest.approx([0.5, 1.0, -0.5])
    assert values(two[:2], **loss) == values(two[:2], advantage="gae", gae={"lam": 1.0})


def test_the_order_of_the_batch_changes_no_bit() -> None:
    samples = [*group([0.1, 0.2, 0.7], "a"), *stepped([0.3, 0.6, 0.1], [[0.1], [0.7], [0.4]], name="b")]
    samples += [*session([(0, 0.1), (1, 0.7), (2, 0.2)]), *session([(0, 0.3)], "u")]
    for name in get_args(AdvantageName):
        loss_config = LossConfig(advantage=name, aggregate_length=9, step_coef=0.3, gae={"values": "position"})
        assert (
            estimate_advantages(samples, loss_config).by_rollout
            == estimate_advantages(samples[::-1], loss_config).by_rollout
        )
