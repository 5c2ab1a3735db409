"""Drafted tokens change neither the tokens of an answer nor their log-probs."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tentalis.inference.drafting import NgramDrafter
from tentalis.inference.jobs import GeneratedChunk
from tests.support.inference_lab import Lab, make_adapter, make_model, trainer_logprobs

TOLERANCE = 1e-4
PROMPTS = ["What is the capital of France?", "fox", "The quick brown fox jumps over the lazy dog. " * 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path | None]:
    """Two adapters, and the base model between them."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(model, folder / "a", seed=1),
        None,
        make_adapter(model, folder / "b", seed=2, r=8, target_modules=["q_proj", "down_proj"]),
    ]


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Lab]:
    lab = Lab(model)
    lab.engine.start()
    yield lab
    lab.engine.stop()


@pytest.fixture
def drafting(model: Path) -> Iterator[Lab]:
    lab = Lab(model, draft_tokens=4, draft_rows=6)
    lab.engine.start()
    yield lab
    lab.engine.stop()


def encoded(lab: Lab) -> list[list[int]]:
    return [list(lab.runtime.tokenizer.encode(text)) for text in PROMPTS]


def know(monkeypatch: pytest.MonkeyPatch, known: Sequence[list[int]], wrong: int) -> None:
    """Lets drafts be what follows in the known sequences; every third ends with the token `wrong`."""

    def draft(drafter: NgramDrafter, most: int) -> list[int]:
        now = drafter._tokens[: drafter._length].tolist()
        for sequence in known:
            following = sequence[len(now) : len(now) + most] if most > 0 and sequence[: len(now)] == now else []
            if following:
                return [*following[:-1], wrong] if len(now) % 3 == 0 else following
        return []

    monkeypatch.setattr(NgramDrafter, "draft", draft)


def assert_same(found: GeneratedChunk, expected: GeneratedChunk) -> None:
    assert found.token_ids == expected.token_ids
    assert np.abs(np.array(found.logprobs) - np.array(expected.logprobs)).max() < TOLERANCE
    assert (found.text, found.finish_reason, found.stop_reason) == (
        expected.text,
        expected.finish_reason,
        expected.stop_reason,
    )


def unused(sequences: Sequence[list[int]]) -> int:
    """A token of none of the sequences."""
    return min(set(range(3, 320)) - {token for sequence in sequences for token in sequence})


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}])
def test_answers_are_the_same_with_two_adapters_and_the_base_in_one_batch(
    plain: Lab,
    drafting: Lab,
    model: Path,
    folders: list[Path | None],
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 3, "ignore_eos": True, "top_logprobs": 2} | params

    def sampled(lab: Lab) -> list[list[GeneratedChunk]]:
        adapters = [None if folder is None else lab.runtime.load_adapter(folder.name, folder) for folder in folders]
        return lab.generate(prompts, 2, adapters, **asked)

    prompts = encoded(plain)
    expected = sampled(plain)
    whole = [prompt + chunk.token_ids for prompt, chunks in zip(prompts, expected, strict=True) for chunk in chunks]
    know(monkeypatch, whole, wrong=unused(whole))
    found = sampled(drafting)
    for prompt, folder, some, others in zip(prompts, folders, found, expected, strict=True):
        for chunk, other in zip(some, others, strict=True):
            assert_same(chunk, other)
            assert chunk.top is not None and other.top is not None
            assert [[token for token, _ in best] for best in chunk.top] == [
                [token for token, _ in best] for best in other.top
            ]
        if not params["temperature"]:
            rows, _ = trainer_logprobs(model, folder, prompt + some[0].token_ids)
            assert np.abs(rows[len(prompt) :] - np.array(some[0].logprobs)).max() < TOLERANCE
    stats = drafting.engine.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.steps < 11 and stats.generated_tokens == 6 * 12


def test_an_answer_ends_within_a_draft(plain: Lab, drafting: Lab, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = encoded(plain)[0]
    free: dict[str, Any] = {"max_tokens": 12, "seed": 4, "temperature": 0.8, "ignore_eos": True}
    [[chunk]] = plain.generate([prompt], **free)
    whole = prompt + chunk.token_ids
    text = plain.runtime.tokenizer.decode(chunk.token_ids, skip_special_tokens=True)
    know(monkeypatch, [whole], wrong=unused([whole]))
    ends: list[dict[str, Any]] = [
        {"max_tokens": 8},
        {"max_tokens": 1},
        {"stop": (text[10:13],)},
        {"stop_token_ids": frozenset([chunk.token_ids[6]])},
    ]
    for end in ends:
        [[expected]] = plain.generate([prompt], **(free | end))
        [[found]] = drafting.generate([prompt], **(free | end))
        assert_same(found, expected)
        # What is kept of it is what the next turn begins with.
        turn = [*prompt, *found.token_ids, 5, 6, 7]
        [[following]] = drafting.generate([turn], max_tokens=4, temperature=0, ignore_eos=True)
        rows, _ = trainer_logprobs(model, None, turn + following.token_ids)
        assert np.abs(rows[len(turn) :] - np.array(following.logprobs)).max() < TOLERANCE
    assert drafting.engine.stats.accepted_tokens


def test_repetitions_are_drafted_while_few_samples_decode(model: Path, tmp_path: Path) -> None:
    echo = shutil.copytree(model, tmp_path / "echo")
    weights = load_file(echo / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()  # each token is followed by itself
    save_file(weights, echo / "model.safetensors", {"format": "pt"})
    lab = Lab(echo, draft_tokens=4, draft_rows=1)
    lab.engine.start()
    try:
        asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        [[found]] = lab.generate([[5, 6, 7]], **asked)
        assert found.token_ids == [7] * 12
        rows, _ = trainer_logprobs(echo, None, [5, 6, 7, *found.token_ids])
        assert np.abs(rows[3:] - np.array(found.logprobs)).max() < TOLERANCE
        stats = lab.engine.stats
        assert stats.accepted_tokens == stats.drafted_tokens == 8 and stats.steps == 3
        lab.generate([[5, 6, 7]], 2, **asked)
        lab.generate([[5, 6, 7]], **asked, presence_penalty=0.1)
        assert stats.drafted_tokens == 8, "two samples, and one with a penalty"
    finally:
        lab.engine.stop()


def test_a_drafted_token_with_broken_numbers_leaves_no_trace(
    plain: Lab, drafting: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = encoded(plain)
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 6, "ignore_eos": True}
    expected = plain.generate(prompts, **asked)
    whole = [prompt + chunks[0].token_ids for prompt, chunks in zip(prompts, expected, strict=True)]
    broken = unused(whole)
    embeddings = drafting.runtime._base_model.embed_tokens
    weight = embeddings.weight.detach().clone()
    weight[broken] = float("nan")
    embeddings.weight = torch.nn.Parameter(weight, requires_grad=False)
    know(monkeypatch, whole, wrong=broken)
    for some, others in zip(drafting.generate(prompts, **asked), expected, strict=True):
        assert_same(some[0], others[0])
    assert drafting.engine.stats.accepted_tokens < drafting.engine.stats.drafted_tokens
