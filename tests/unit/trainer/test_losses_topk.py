"""Distillation over likeliest tokens: the choice of the hint, values by hand, finite differences, the reverse KL."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config.loss import LossConfig
from trainer.losses.topk import TopKTokens, choose_hint, topk_distillation

STUDENT = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
TEACHERS = torch.tensor(
    [
        [[0.1, 0.1, 0.2, 0.6], [0.25, 0.25, 0.25, 0.25]],
        [[0.4, 0.4, 0.1, 0.1], [0.1, 0.1, 0.3, 0.5]],
        [[0.6, 0.2, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1]],
    ],
    dtype=torch.float64,
)


def likeliest(
    student: Tensor, k: int, listed: int, hints: Sequence[int] = (0, 1), sequences: Sequence[int] = (0, 0, 1)
) -> TopKTokens:
    """All distributions are over four tokens; equal ones go by their number."""
    ids = torch.sort(student, dim=1, descending=True, stable=True).indices[:, :k]
    teachers = TEACHERS[:, list(hints)]
    order = torch.sort(teachers, dim=2, descending=True, stable=True).indices[:, :, :listed]
    logprobs = student.log().gather(1, torch.cat([ids, order.flatten(1)], 1))
    taught = teachers.log().gather(2, order)
    return TopKTokens(ids, order, taught, logprobs, logprobs.detach(), torch.tensor(sequences), max(sequences) + 1)


def rows(tokens: TopKTokens, where: Any) -> TopKTokens:
    values = {name: getattr(tokens, name) for name in TopKTokens.__dataclass_fields__}
    return TopKTokens(**{name: value[where] if isinstance(value, Tensor) else value for name, value in values.items()})


def settings(**topk: Any) -> LossConfig:
    return LossConfig(opd_kind="topk", opd_clip=100.0, topk={"k": 2} | topk)


@pytest.mark.parametrize(
    ("choice", "hints", "overlap"),
    [("shortest", [0, 0, 0], [0, 2, 2]), ("token", [1, 0, 0], [2, 2, 2]), ("sequence", [0, 0, 0], [0, 2, 2])],
)
def test_the_hint_is_chosen_by_overlap(choice: Any, hints: list[int], overlap: list[int]) -> None:
    hint, agreed = choose_hint(likeliest(STUDENT, 2, 2), settings(choice=choice).topk)
    assert (hint.tolist(), agreed.tolist()) == (hints, overlap)
    other, _ = choose_hint(likeliest(STUDENT, 2, 2, sequences=(0, 1, 1)), settings(choice=choice).topk)
    assert other.tolist() == ([1, 0, 0] if choice != "shortest" else [0, 0, 0])


def test_a_hint_that_is_not_there_is_not_chosen() -> None:
    topk_tokens = likeliest(STUDENT, 2, 2)
    gone = replace(topk_tokens, teacher_ids=topk_tokens.teacher_ids.clone())
    gone.teacher_ids[:, 0] = -1
    for choice in ("shortest", "token", "sequence"):
        assert choose_hint(gone, settings(choice=choice).topk)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("choice", ["sequence", "token", "shortest"])
def test_with_everything_listed_and_a_tail_the_gradient_is_that_of_the_reverse_divergence(choice: Any) -> None:
    """Also where the support is a part: the outcomes are then its tokens and the rest."""
    logits = STUDENT.log().requires_grad_()
    student = logits.softmax(1)
    topk_tokens = likeliest(student, 2, 4)
    loss = settings(choice=choice, tail=True)
    hint, _ = choose_hint(topk_tokens, loss.topk)
    teacher = TEACHERS[torch.arange(3), hint]
    p = student.gather(1, topk_tokens.student_ids)
    q = teacher.gather(1, topk_tokens.student_ids)
    p, q = (torch.cat([each, 1 - each.sum(1, keepdim=True)], 1) for each in (p, q))
    exact = torch.autograd.grad((p * (p / q).log()).sum(), logits, retain_graph=True)[0]
    ours = torch.autograd.grad(topk_distillation(topk_tokens, loss)[0], logits)[0]
    torch.testing.assert_close(ours, exact)


def test_values_by_hand_without_a_tail() -> None:
    one = rows(likeliest(STUDENT, 2, 2), slice(1, 2))
    # Student .4 .3 on tokens 0 and 1, teacher .4 .4: weights 4/7 and 3/7, differences 0 and log(4/3).
    value, metrics = topk_distillation(one, settings(tail=False))
    expected = -3 / 7 * float(torch.tensor(4 / 3).log())
    assert float(value) == pytest.approx(expected, abs=1e-6)
    assert float(metrics["overlap"]) == 1.0
    value, _ = topk_distillation(one, settings(tail=False).model_copy(update={"opd_clip": 0.1}))
    assert float(value) == pytest.approx(-3 / 7 * 0.1)


def test_a_token_that_the_teacher_did_not_list_has_at_most_its_last_and_its_tail() -> None:
    every = likeliest(STUDENT, 2, 2, hints=(0,))
    first = rows(every, slice(1))
    # Student's tokens 0 and 1 (.5, .2); the teacher listed 3 and 2 (.6, .2): at most .2 for each of the others.
    value, _ = topk_distillation(first, settings(tail=False))
    w = torch.tensor([5 / 7, 2 / 7])
    expected = -(w * torch.tensor([0.2 / 0.5, 0.2 / 0.2]).log()).sum()
    assert float(value) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("support", ["student", "teacher", "overlap"])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("choice", ["sequence", "token"])
def test_finite_differences(support: Any, tail: bool, choice: Any) -> None:
    topk_tokens = likeliest(STUDENT, 2, 2)
    noise = torch.randn(topk_tokens.logprobs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = topk_tokens.old_logprobs + 0.05 * noise
    loss = settings(support=support, tail=tail, choice=choice)
    assert torch.autograd.gradcheck(
        lambda x: topk_distillation(replace(topk_tokens, logprobs=x), loss)[0], (moved.requires_grad_(),)
    )
    value = topk_distillation(replace(topk_tokens, logprobs=moved), loss)[0]
    assert float(torch.autograd.grad(value, moved)[0].abs().max()) > 0


@pytest.mark.parametrize("support", ["student", "teacher", "overlap"])
def test_order_and_split_leave_the_sum(support: Any) -> None:
    topk_tokens = likeliest(STUDENT, 2, 3)
    loss = settings(support=support)

    whole = topk_distillation(topk_tokens, loss)[0]
    torch.testing.assert_close(whole, topk_distillation(rows(topk_tokens, torch.tensor([2, 0, 1])), loss)[0])
    halves = [topk_distillation(rows(topk_tokens, torch.tensor(where)), loss)[0] for where in ([0, 1], [2])]
    torch.testing.assert_close(whole, halves[0] + halves[1])
    assert float(topk_distillation(rows(topk_tokens, torch.tensor([], dtype=torch.int64)), loss)[0]) == 0.0
