"""A step over rows of very different length gives the same as a step over each row alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.inference.runtime import ModelRuntime
from tests.support.inference_lab import Lab, make_adapter, make_model, trainer_logprobs

LENGTH = 500
VOCABULARY = 320


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runtime(model: Path) -> ModelRuntime:
    return ModelRuntime(model, torch.device("cpu"), torch.float32)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 11), st.integers(1, LENGTH - 12)), min_size=2, max_size=12).map(dict),
    count=st.integers(1, 12),
    seed=st.integers(0, 100),
)
@torch.inference_mode()
def test_rows_are_computed_as_alone(runtime: ModelRuntime, rows: dict[int, int], count: int, seed: int) -> None:
    torch.manual_seed(seed)
    numbers, lengths = torch.tensor(list(rows)), torch.tensor(list(rows.values()))
    tokens = torch.randint(0, VOCABULARY, (len(rows), LENGTH))
    together, alone = runtime.new_cache(), runtime.new_cache()
    together.resize(12, LENGTH, 0)
    alone.resize(1, LENGTH, 0)
    runtime.route([None])
    expected = []
    for row, (number, length) in enumerate(rows.items()):
        runtime.hidden(tokens[row : row + 1, :length], runtime.prefill_step(alone, [0], length))
        together.load_row(number, alone.keys[:, 0], alone.values[:, 0], length)
        new = tokens[row : row + 1, length : length + count]
        expected.append(runtime.hidden(new, runtime.continue_step(alone, lengths[row : row + 1], count)))
    step = runtime.continue_step(together, lengths, count, numbers)
    new = torch.stack([tokens[row, length : length + count] for row, length in enumerate(rows.values())])
    torch.testing.assert_close(runtime.hidden(new, step), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_a_long_row_does_not_lengthen_short_ones(runtime: ModelRuntime) -> None:
    cache = runtime.new_cache()
    cache.resize(12, LENGTH, 0)
    step = runtime.continue_step(cache, torch.tensor([6] * 5 + [480] + [9] * 6), 1)
    assert [(run.batch, run.width) for run in step.runs] == [(slice(0, 5), 7), (slice(5, 6), 481), (slice(6, 12), 10)]


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_logprobs_of_short_rows_beside_long_ones_are_the_trainers(
    model: Path, tmp_path: Path, draft_tokens: int
) -> None:
    folders = [make_adapter(model, tmp_path / "a", seed=1), None]
    lab = Lab(model, draft_tokens=draft_tokens, draft_rows=12, chunk_tokens=100)
    lab.engine.start()
    try:
        adapters = [None if folder is None else lab.runtime.load_adapter("a", folder) for folder in folders]
        short, long = [5, 6, 7] * 3, list(range(3, 303)) + [5, 6, 7] * 50
        prompts = [short, short[1:], short[:3], long, short[2:], long[:-30], short[:5], short[:6]]
        versions = [0, 1, 0, 1, 1, 0, 0, 1]
        samples = lab.generate(
            prompts, 1, [adapters[each] for each in versions], max_tokens=40, temperature=0, ignore_eos=True
        )
        for prompt, [chunk], version in zip(prompts, samples, versions, strict=True):
            expected, _ = trainer_logprobs(model, folders[version], [*prompt, *chunk.token_ids])
            assert abs(expected[len(prompt) :] - chunk.logprobs).max() < 1e-4
        assert bool(lab.engine.stats.drafted_tokens) == bool(draft_tokens)
    finally:
        lab.engine.stop()
