"""Packed micro-batches: the log-probs and gradients of each rollout alone, only cheaper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.records import Rollout
from schemas.tensors import float32_bytes, float32_view, int32_view, uint8_bytes
from tests.support.trainer_lab import examples, rollout, rollouts, tiny_model
from trainer.config.loss import LossConfig
from trainer.config.trainer_config import LoraShape
from trainer.data.example import TrainingExample
from trainer.data.pack import pack_examples
from trainer.model.model import LoraPolicy
from trainer.step.objective import LossCounts, objective


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(model: Path) -> LoraPolicy:
    made = LoraPolicy(model, "tiny-base", LoraShape(rank=4, alpha=8.0), 0, "cpu", torch.float32)
    with torch.no_grad():
        # A trained adapter: with B = 0 nothing would depend on the low-rank path.
        for name, parameter in made.trained_parameters():
            if ".lora_B." in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    return made


def reference_of(model: Path, policy: LoraPolicy) -> Any:
    """The policy by transformers and PEFT, without anything of ours."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = model / "reference"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(policy.files().others["adapter_config.json"])
    (folder / "adapter_model.safetensors").write_bytes(policy.weights_bytes())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder).eval()


def alone(model: Path, policy: LoraPolicy, packed_rollout: Rollout) -> Tensor:
    """The log-probs of a rollout's trained tokens by the reference."""
    reference = reference_of(model, policy)
    ids = torch.tensor(int32_view(packed_rollout.token_ids).tolist())
    with torch.no_grad():
        logits = reference(input_ids=ids.unsqueeze(0)).logits[0, :-1] / packed_rollout.sampling.temperature
    picked = logits.log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)
    return picked[torch.tensor([index - 1 for index, trained in enumerate(packed_rollout.loss_mask) if trained])]


def test_packed_equals_alone_and_the_adapter_loads_into_peft(model: Path, policy: LoraPolicy) -> None:
    made = [*rollouts(2, 3), rollout("other", prompt=[5], response=[9, 9, 1], temperature=0.7)]
    batch = pack_examples(examples(made))
    logprobs, entropies, *_ = policy(batch)
    expected = torch.cat([alone(model, policy, r) for r in made])
    torch.testing.assert_close(logprobs.detach(), expected, atol=1e-5, rtol=1e-5)
    assert bool((entropies > 0).all())
    shared = sum(r.n_tokens for r in made) - len(batch.input_ids)
    prompts = {r.head.task_id: r.loss_mask.index(1) for r in made}
    # A group's prompt is there once, and no rollout's last token.
    assert shared == 2 * prompts["t0"] + 2 * prompts["t1"] + len(made)


def test_packed_equals_padded(model: Path, policy: LoraPolicy) -> None:
    made = rollouts(3, 4)
    ids = [torch.tensor(int32_view(r.token_ids).tolist()) for r in made]
    padded, seen = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for rows in (ids, [torch.ones_like(each) for each in ids])
    )
    with torch.no_grad():
        logits = reference_of(model, policy)(input_ids=padded, attention_mask=seen).logits
    picked = logits[:, :-1].log_softmax(-1).gather(2, padded[:, 1:, None]).squeeze(2)
    expected = [picked[row, torch.tensor(list(r.loss_mask))[1:].nonzero().squeeze(1)] for row, r in enumerate(made)]
    torch.testing.assert_close(
        policy(pack_examples(examples(made))).logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5
    )


def test_a_mask_with_gaps_is_one_sequence(model: Path, policy: LoraPolicy) -> None:
    turns = rollout(prompt=[1, 2], response=[3, 4, 5, 6, 7]).model_copy(
        update={"loss_mask": uint8_bytes([0, 0, 1, 0, 0, 1, 1])}
    )
    logprobs = policy(pack_examples(examples([turns]))).logprobs
    torch.testing.assert_close(logprobs.detach(), alone(model, policy, turns), atol=1e-5, rtol=1e-5)


def gradients(policy: LoraPolicy, packs: Sequence[Sequence[TrainingExample]]) -> list[Tensor]:
    policy.zero_grad()
    counts = LossCounts.of(packs, LossConfig())
    for part in packs:
        batch = pack_examples(part)
        total, _ = objective(policy(batch), batch.token_targets, LossConfig(), counts)
        total.backward()
    return [parameter.grad.clone() for _, parameter in policy.trained_parameters() if parameter.grad is not None]


def test_neither_the_split_into_micro_batches_nor_the_order_changes_the_gradient(policy: LoraPolicy) -> None:
    made = examples(rollouts(3, 4))
    whole = gradients(policy, [made])
    assert len(whole) == len(policy.trained_parameters())
    assert all(float(gradient.abs().max()) > 0 for gradient in whole)
    for other in ([made[:5], made[5:]], [[made[i]] for i in (7, 2, 5, 0, 11, 1, 3, 10, 4, 6, 9, 8)]):
        for left, right in zip(whole, gradients(policy, other), strict=True):
            torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


def test_tokens_with_non_finite_log_probs_leave_loss_and_count() -> None:
    nan, inf = float("nan"), float("inf")
    made = rollout(prompt=[1, 2], response=[3, 4, 5, 6], sampler=[-1.0, nan, -inf, -2.0], teacher=[-1.5, -1, -1, nan])
    (example,) = examples([made])
    assert example.trained_indices.tolist() == [2, 5]
    assert example.token_targets.sampler_logprobs.tolist() == [-1.0, -2.0]
    assert example.token_targets.in_rl.tolist() == [True, True]
    assert example.token_targets.in_opd.tolist() == [True, False]
    assert example.token_targets.opd_advantages.tolist() == [-0.5, 0.0]


def test_only_tokens_of_the_mask_are_in_the_loss() -> None:
    (example,) = examples([rollout(prompt=[1, 2, 3], response=[4, 5])])
    assert example.trained_indices.tolist() == [3, 4]
    batch = pack_examples([example])
    assert batch.source.tolist() == [2, 3]
    assert batch.targets.tolist() == [4, 5]


def test_what_the_sampler_says_outside_the_mask_does_not_matter(policy: LoraPolicy) -> None:
    """Prompt tokens have no gradient: nothing that is said of them reaches the loss."""
    made = rollout(prompt=[1, 2, 3], response=[4, 5], sampler=[-1.0, -2.0], teacher=[-1.2, -1.9])
    said = {
        name: float32_bytes([-7.0, -8.0, -9.0, *float32_view(getattr(made, name))[3:]])
        for name in ("sampler_logprobs", "teacher_logprobs")
    }
    plain, talked = ([examples([r])] for r in (made, made.model_copy(update=said)))
    for left, right in zip(gradients(policy, plain), gradients(policy, talked), strict=True):
        assert torch.equal(left, right)


def test_a_rollout_without_any_advantage_trains_nothing() -> None:
    (equal,) = examples([rollout(reward=1.0, rewards=[1.0, 1.0], n=2)])
    (lone,) = examples([rollout(reward=1.0, rewards=[1.0], n=2)])
    assert not equal.has_gradient(LossConfig()) and int(equal.token_targets.in_rl.sum()) == 3
    assert not lone.has_gradient(LossConfig()) and int(lone.token_targets.in_rl.sum()) == 0


def test_a_pack_says_which_rollout_a_token_belongs_to() -> None:
    first, second = examples([rollout("a", response=[7, 8]), rollout("b", response=[9, 1, 2])])
    signal = pack_examples([first, second, first]).token_targets
    assert signal.sequences.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert len(signal.groups) == 3 and int(signal.groups[0]) == int(signal.groups[2]) != int(signal.groups[1])
