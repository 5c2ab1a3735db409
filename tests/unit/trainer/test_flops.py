"""The denominator of MFU: the operations of packed positions, attention counted as far as it is causal."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.support.trainer_lab import config, examples, rollouts, tiny_model
from trainer.data.pack import pack_examples
from trainer.model.flops import ModelShape, measure_peak_flops, packed_flops
from trainer.model.model import LoraPolicy


def test_every_pair_that_attention_sees_is_counted_once_and_no_other() -> None:
    made = examples(rollouts(2, 4))
    batch = pack_examples(made)
    assert any(span.prefix_end > span.prefix_start for span in batch.spans), "prompts are shared"
    pairs = 0
    for span in batch.spans:
        seen = [*range(span.prefix_start, span.prefix_end), *range(span.start, span.end)]
        pairs += sum(key <= query for query, key in itertools.product(range(span.start, span.end), seen))
    positions, trained = len(batch.input_ids), len(batch.targets)
    assert packed_flops(batch.spans, trained, ModelShape(0, 0, 0, 3, 16)) == pairs * 3 * 12 * 16
    # Forward, and backward to the input alone: a frozen matrix has no gradient. The adapter has one.
    assert packed_flops(batch.spans, trained, ModelShape(100, 0, 0, 0, 0)) == positions * 100 * 2 * 2
    assert packed_flops(batch.spans, trained, ModelShape(0, 0, 100, 0, 0)) == positions * 100 * 2 * 3
    assert packed_flops(batch.spans, trained, ModelShape(0, 100, 0, 0, 0)) == trained * 100 * 2 * 2


def test_the_shape_of_a_model_is_read_off_its_layers(tmp_path: Path) -> None:
    run_config = config(tiny_model(tmp_path))
    policy = LoraPolicy(tmp_path, run_config.base_model_name, run_config.lora, 0, "cpu", torch.float32)
    attention, feed_forward = [(32, 32), (32, 16), (32, 16), (32, 32)], [(32, 64), (32, 64), (64, 32)]
    layers = (attention + feed_forward) * 2
    assert policy.shape() == ModelShape(
        body=sum(inner * outer for inner, outer in layers),
        head=64 * 32,
        adapter=sum(4 * (inner + outer) for inner, outer in layers),
        layers=2,
        width=32,
    )


def test_the_peak_is_that_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 2.0, 2.5, 2.5, 4.5])
    monkeypatch.setattr("trainer.model.flops.time.perf_counter", lambda: next(clock))
    assert measure_peak_flops(torch.float32, "cpu", 8, 3) == 2 * 8**3 / 0.5
