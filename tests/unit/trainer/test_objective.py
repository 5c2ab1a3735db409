"""The whole loss on the tiny model: every configuration, split, permuted, by hand; what reaches it from a plan."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.records import Rollout, TokenSpan
from schemas.tensors import float32_bytes, float32_view, int32_bytes, uint8_view
from tests.support.nothing_read_back import NothingIsReadBack
from tests.support.trainer_lab import VOCAB, examples, rollout, rollouts, tiny_model
from trainer.config.loss import LossConfig
from trainer.config.trainer_config import LoraShape
from trainer.data.candidates import WITHOUT_TOPK, malformed_reason, offer_of
from trainer.data.example import TrainingExample
from trainer.data.pack import pack_examples
from trainer.data.plan import BatchDraft, PlanContext, plan_of
from trainer.model.model import LoraPolicy
from trainer.step.objective import LossCounts, objective


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoraPolicy:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    made = LoraPolicy(model, "tiny-base", LoraShape(rank=4, alpha=8.0), 0, "cpu", torch.float32)
    with torch.no_grad():
        for name, parameter in made.trained_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return made


def with_more(made: Sequence[Rollout], policy: LoraPolicy) -> list[Rollout]:
    """Near the policy, with steps, sessions, and the likeliest tokens of a teacher under two hints."""
    found = []
    generator = torch.Generator().manual_seed(3)
    for number, each in enumerate(made):
        n = each.n_tokens
        ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:3] for _ in range(2 * n)])
        listed = torch.sort(torch.rand((2 * n, 4), generator=generator).log_softmax(1)[:, :3], descending=True).values
        (example,) = examples([each])
        with torch.no_grad():
            near = policy(pack_examples([example])).logprobs + 0.2 * torch.randn(
                len(example.trained_indices), generator=generator
            )
        sampler = torch.from_numpy(float32_view(each.sampler_logprobs).copy())
        sampler[example.trained_indices] = near
        start = each.loss_mask.index(1)
        middle = (start + n + 1) // 2
        spans = tuple(TokenSpan(start=a, end=b) for a, b in ((start, middle), (middle, n)) if b > a)
        found.append(
            each.model_copy(
                update={
                    "sampler_logprobs": float32_bytes(sampler.numpy()),
                    "topk": 3 if each.has_opd else 0,
                    "topk_ids": int32_bytes(ids.flatten().numpy()) if each.has_opd else b"",
                    "topk_logprobs": float32_bytes(listed.flatten().numpy()) if each.has_opd else b"",
                    "step_spans": spans,
                    "step_scores": float32_bytes([0.3 * number - i for i in range(len(spans))]),
                    "head": each.head.model_copy(update={"session_id": f"s{number % 3}", "turn_index": number // 3}),
                }
            )
        )
    return found


EVERY: dict[str, dict[str, Any]] = {
    "clipped": {},
    "dual_clip": {"dual_clip": 1.1},
    "dapo": {"kind": "dapo", "overlong": {"length": 9, "buffer": 6}},
    "cispo": {"kind": "cispo"},
    "gspo": {"kind": "gspo", "gspo_low": 0.05, "gspo_high": 0.05},
    "masked": {"kind": "masked", "mask_low": 0.01, "mask_high": 0.01},
    "truncated_is": {"kind": "truncated_is", "importance": {"high": 1.1}},
    "sequence_mask": {"kind": "truncated_is", "importance": {"high": 1.5, "mode": "mask", "level": "sequence"}},
    "grpo": {"advantage": "group_mean_std", "aggregate": "sequence_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "aggregate_length": 12},
    "leave_one_out": {"advantage": "leave_one_out"},
    "binary": {"advantage": "binary"},
    "stepwise": {"advantage": "stepwise"},
    "gae": {"advantage": "gae", "gae": {"values": "position", "rewards": "step"}},
    "kl": {"kl": {"coef": 0.3}},
    "kl_base": {"kl": {"coef": 0.3, "against": "base", "kind": "k3"}},
    "entropy": {"entropy_coef": 0.2},
    "pair": {"pair": {"weight": 0.7, "threshold": 0.5}, "rl_weight": 0.3},
    "infonce": {"pair": {"weight": 0.7, "threshold": 0.5, "kind": "infonce_pair"}},
    "topk": {"opd_kind": "topk", "topk": {"k": 3}},
    "topk_teacher": {"opd_kind": "topk", "topk": {"k": 2, "support": "teacher", "tail": False, "choice": "token"}},
}
CONFIGURED = pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)


def gradient(
    policy: LoraPolicy, packs: Sequence[Sequence[TrainingExample]], loss: LossConfig
) -> tuple[float, list[Tensor]]:
    policy.zero_grad()
    counts, value = LossCounts.of(packs, loss), 0.0
    for part in packs:
        batch = pack_examples(part)
        base = policy.base_logprobs(batch) if loss.kl.against == "base" else None
        scores = policy(batch, loss.entropy_coef > 0, loss.topk.k if loss.opd_kind == "topk" else 0)
        total, _ = objective(scores, batch.token_targets, loss, counts, base)
        total.backward()
        value += float(total.detach())
    return value, [p.grad.clone() for _, p in policy.trained_parameters() if p.grad is not None]


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("pair", "infonce")])
def test_the_loss_of_a_micro_batch_does_not_wait_for_a_gpu(policy: LoraPolicy, name: str) -> None:
    """A loss on pairs does: the pairs are found among the values."""
    loss = LossConfig.model_validate(EVERY[name])
    found = examples(with_more(rollouts(2, 4, seed=5), policy), loss)
    batch = pack_examples(found)
    base = policy.base_logprobs(batch) if loss.kl.against == "base" else None
    scores = policy(batch, loss.entropy_coef > 0, loss.topk.k if loss.opd_kind == "topk" else 0)
    counts = LossCounts.of([found], loss)
    with NothingIsReadBack():
        total, _ = objective(scores, batch.token_targets, loss, counts, base)
    assert float(total.detach()) != 0.0


@CONFIGURED
def test_neither_the_split_nor_the_order_changes_loss_or_gradient(policy: LoraPolicy, settings: dict[str, Any]) -> None:
    loss = LossConfig.model_validate(settings)
    made = examples(with_more(rollouts(3, 4), policy), loss)
    value, whole = gradient(policy, [made], loss)
    assert value != 0.0 and all(float(each.abs().max()) > 0 for each in whole)
    # Pairs need both answers in one forward pass: there the plan never divides a group.
    splits = [[made[8:], made[:4], made[7:3:-1]]]
    if loss.pair.weight == 0:
        splits += [[made[:5], made[5:]], [[made[i]] for i in (7, 2, 5, 0, 11, 1, 3, 10, 4, 6, 9, 8)]]
    for split in splits:
        other_value, other = gradient(policy, split, loss)
        assert other_value == pytest.approx(value, rel=1e-4, abs=1e-6)
        for left, right in zip(whole, other, strict=True):
            torch.testing.assert_close(left, right, atol=2e-6, rtol=1e-3)


@CONFIGURED
def test_tokens_outside_the_mask_and_not_finite_have_no_part(policy: LoraPolicy, settings: dict[str, Any]) -> None:
    """Whatever is said of prompt tokens changes nothing; a token without a finite log-prob leaves loss and count."""
    loss = LossConfig.model_validate(settings)
    made = with_more(rollouts(2, 4), policy)
    talked, gone = [], []
    for each in made:
        mask = uint8_view(each.loss_mask) == 1
        said = {}
        for name in ("sampler_logprobs", "teacher_logprobs"):
            if getattr(each, name) is not None:
                values = float32_view(getattr(each, name)).copy()
                values[~mask] = -7.0
                said[name] = float32_bytes(values)
        talked.append(each.model_copy(update=said))
        values = float32_view(each.sampler_logprobs).copy()
        values[-1] = float("nan")
        gone.append(each.model_copy(update={"sampler_logprobs": float32_bytes(values)}))
    value, plain = gradient(policy, [examples(made, loss)], loss)
    other_value, other = gradient(policy, [examples(talked, loss)], loss)
    assert value == other_value
    assert all(torch.equal(left, right) for left, right in zip(plain, other, strict=True))
    left_out = [e for e in examples(gone, loss) if len(e.trained_indices)]
    before, after = LossCounts.of([examples(made, loss)], loss), LossCounts.of([left_out], loss)
    assert after.tokens < before.tokens
    assert gradient(policy, [left_out], loss)[0] != value


def test_each_part_has_its_own_denominator(policy: LoraPolicy) -> None:
    made = with_more(rollouts(2, 4), policy)
    both = gradient(policy, [examples(made)], LossConfig())[1]
    rl = gradient(policy, [examples(made, loss_config := LossConfig(opd_weight=0.0))], loss_config)[1]
    opd = gradient(policy, [examples(made, loss_config := LossConfig(rl_weight=0.0))], loss_config)[1]
    for whole, left, right in zip(both, rl, opd, strict=True):
        torch.testing.assert_close(whole, left + right, atol=1e-6, rtol=1e-4)
    # Twice as many rollouts without a teacher do not dilute what the teacher says.
    untaught = [r.model_copy(update={"teacher_logprobs": None, "has_opd": False}) for r in made]
    more = gradient(policy, [examples([*made, *untaught], loss_config)], loss_config)[1]
    for left, right in zip(opd, more, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


def test_the_whole_is_its_parts_weighted_each_over_its_own_count(policy: LoraPolicy) -> None:
    """The formula of docs/concepts/losses.md, computed again: weights, signs, denominators and their gradients."""
    weights: dict[str, Any] = {"rl_weight": 0.6, "opd_weight": 0.3, "entropy_coef": 0.1}
    loss = LossConfig.model_validate(
        weights | {"kl": {"coef": 0.2, "kind": "k3"}, "pair": {"weight": 0.7, "threshold": 0.5, "margin": 5.0}}
    )
    made = with_more(rollouts(2, 4), policy)
    found = examples(made, loss)
    batch = pack_examples(found)
    scores, signal = policy(batch, True), batch.token_targets
    log_ratio = scores.logprobs - signal.sampler_logprobs

    def surrogate(where: Tensor, advantages: Tensor) -> Tensor:
        ratio, a = log_ratio[where].exp(), advantages[where]
        return torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.28) * a).sum() / int(where.sum())

    held = signal.in_rl | signal.in_opd
    kl = (torch.exp(-log_ratio[held]) + log_ratio[held] - 1).mean()
    means = [part.mean() for part in scores.logprobs.split([len(each.trained_indices) for each in found])]
    each_pair = [
        5.0 - (means[i] - means[j])
        for i, better in enumerate(made)
        for j, worse in enumerate(made)
        if better.head.task_id == worse.head.task_id and (better.reward or 0.0) >= 0.5 > (worse.reward or 0.0)
    ]
    expected = (
        0.6 * surrogate(signal.in_rl, signal.rl_advantages)
        + 0.3 * surrogate(signal.in_opd, signal.opd_advantages)
        + 0.2 * kl
        - 0.1 * scores.entropies[held].mean()
        + 0.7 * torch.stack(each_pair).mean()
    )
    total, _ = objective(scores, signal, loss, LossCounts.of([found], loss))
    torch.testing.assert_close(total, expected)
    wanted, ours = (
        torch.autograd.grad(each, (scores.logprobs, scores.entropies), retain_graph=True) for each in (expected, total)
    )
    torch.testing.assert_close(ours, wanted)


def test_the_weights_are_those_of_the_aggregate(policy: LoraPolicy) -> None:
    made = rollouts(1, 2)
    lengths = [each.loss_mask.count(1) for each in made]
    for settings, weights, count in (
        ({}, [1.0, 1.0], float(sum(lengths))),
        ({"aggregate": "sequence_mean"}, [1 / n for n in lengths], 2.0),
        ({"aggregate": "sequence_sum", "aggregate_length": 20}, [0.05, 0.05], 2.0),
        ({"kind": "gspo"}, [1 / n for n in lengths], 2.0),
    ):
        loss = LossConfig.model_validate(settings)
        found = examples(made, loss)
        assert [float(e.token_targets.rl_weights[0]) for e in found] == pytest.approx(weights)
        assert LossCounts.of([found], loss).rl == count
    with pytest.raises(ValueError, match="sequence_sum needs aggregate_length"):
        LossConfig(advantage="dr_grpo")


def test_the_base_has_no_adapter_and_the_policy_keeps_its_own(policy: LoraPolicy) -> None:
    batch = pack_examples(examples(rollouts(1, 2)))
    before = policy(batch).logprobs.detach()
    base = policy.base_logprobs(batch)
    assert float((base - before).abs().max()) > 0.01
    assert torch.equal(policy(batch).logprobs.detach(), before)


# --- what reaches the loss from the log -------------------------------------------------------------------------------


def test_groups_of_equal_rewards_are_dropped_when_a_batch_is_planned() -> None:
    flat = [rollout("flat", i, reward=0.7, rewards=[0.7, 0.7, 0.7], n=3) for i in range(3)]
    taught = rollout("taught", 0, reward=0.7, rewards=[0.7, 0.7], n=2, teacher=[-1, -1, -1])
    dapo = LossConfig(kind="dapo")
    assert [offer_of(r, 0, 0, 0, 99, dapo).unfit for r in flat] == ["equal rewards"] * 3
    assert offer_of(flat[0], 0, 0, 0, 99).unfit is None
    offer = offer_of(taught, 0, 0, 0, 99, dapo)
    assert (offer.unfit, offer.rl, offer.opd) == (None, False, True)
    assert offer_of(rollout(reward=0.7), 0, 0, 0, 99, dapo).unfit is None


def test_a_group_needs_two_rewards_where_it_is_compared_and_no_other() -> None:
    lone = rollout(reward=1.0, rewards=[1.0, 0.0], n=4).model_copy(update={"n_rewarded": 1})
    assert offer_of(lone, 0, 0, 0, 99).unfit == "fewer than two samples of its group have a reward"
    assert offer_of(lone, 0, 0, 0, 99, LossConfig(advantage="binary")).unfit is None
    assert examples([lone])[0].token_targets.in_rl.tolist() == [False] * 3


def test_long_answers_and_teachers_without_likeliest_tokens_are_left_out() -> None:
    short = LossConfig(overlong={"length": 3, "filter": True})
    assert offer_of(rollout(), 0, 0, 0, 99, short).unfit == "too long an answer"
    taught = rollout(reward=None, teacher=[-1, -1, -1])
    assert offer_of(taught, 0, 0, 0, 99, LossConfig(opd_kind="topk")).unfit == WITHOUT_TOPK


def test_pairs_are_never_divided_by_the_plan() -> None:
    made = rollouts(3, 6)
    offers = tuple(offer_of(r, 0, i, 0, 128) for i, r in enumerate(made))
    places: dict[bool, set[tuple[str, int, int]]] = {}
    for whole in (False, True):
        head = PlanContext("run", "tiny", "m", 2, 30, 0, "owner", whole)
        rows = plan_of(BatchDraft(offers, (), {0: len(offers)}, ()), head, 1, 1, 0).rows
        places[whole] = {(row.rollout_id.split("/")[0], row.rank, row.micro_batch) for row in rows}
    assert len(places[True]) == 3 < len(places[False])


SEVEN = float32_bytes([-1.0] * 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"topk": 2, "topk_ids": int32_bytes([1] * 7), "topk_logprobs": SEVEN},
            "7 top-K token ids; expected",
        ),
        (
            {"topk": 1, "topk_ids": int32_bytes([99] * 7), "topk_logprobs": SEVEN},
            "likeliest tokens outside",
        ),
        (
            {"topk_ids": int32_bytes([1] * 7), "topk_logprobs": SEVEN},
            "7 top-K token ids; expected 0",
        ),
        ({"step_scores": float32_bytes([1.0])}, "1 scores for 0 steps"),
        ({"step_scores": float32_bytes([float("nan")]), "step_spans": (TokenSpan(start=4, end=5),)}, "not finite"),
    ],
)
def test_what_contradicts_itself_is_dead(change: dict[str, Any], message: str) -> None:
    assert message in (malformed_reason(rollout().model_copy(update=change), VOCAB) or "")
