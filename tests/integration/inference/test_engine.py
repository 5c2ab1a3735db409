"""The engine against the trainer's own arithmetic, and its batching."""

import json
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tentalis.inference.adapter_cache import AdapterCacheFull
from tentalis.inference.jobs import EngineError, EngineStopped, GeneratedChunk, GenerateJob, ScoreJob
from tentalis.inference.long_prompt import LongPrompt
from tentalis.inference.lora import AdapterMissing, AdapterRefused
from tentalis.inference.runtime import UnsupportedModel
from tentalis.inference.sampling import SamplingParams
from tests.support.inference_lab import Lab, make_adapter, make_model, make_tokenizer, trainer_logprobs

TOLERANCE = 1e-4
PROMPTS = ["What is the capital of France?", "fox", "The quick brown fox jumps over the lazy dog. " * 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter_folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        make_adapter(model, folder / "a", seed=1),
        make_adapter(model, folder / "b", seed=2, r=8, use_rslora=True, target_modules=["q_proj", "down_proj"]),
    ]


@pytest.fixture(scope="module")
def lab(model: Path) -> Iterator[Lab]:
    lab = Lab(model, max_batch=12)
    lab.engine.start()
    yield lab
    lab.engine.stop()


def encoded(lab: Lab) -> list[list[int]]:
    return [list(lab.runtime.tokenizer.encode(text)) for text in PROMPTS]


def assert_trainer_agrees(
    model: Path, adapter: Path | None, prompt: list[int], chunk: GeneratedChunk, temperature: float
) -> None:
    expected, _ = trainer_logprobs(model, adapter, prompt + chunk.token_ids, temperature)
    assert np.abs(expected[len(prompt) :] - np.array(chunk.logprobs)).max() < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_equal_the_trainers_recomputation(
    lab: Lab, model: Path, adapter_folders: list[Path], temperature: float
) -> None:
    adapter = lab.runtime.load_adapter("a", adapter_folders[0])
    prompts = encoded(lab)
    samples = lab.generate(prompts, 8, [adapter] * 3, max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    for prompt, chunks in zip(prompts, samples, strict=True):
        assert len({tuple(chunk.token_ids) for chunk in chunks}) > 4
        for chunk in chunks:
            assert len(chunk.token_ids) == len(chunk.logprobs) == 24
            assert_trainer_agrees(model, adapter_folders[0], prompt, chunk, temperature)
    base, _ = trainer_logprobs(model, None, prompts[0] + samples[0][0].token_ids, temperature)
    assert np.abs(base[len(prompts[0]) :] - np.array(samples[0][0].logprobs)).max() > 0.1  # the adapter does something


def test_different_adapters_in_one_batch(lab: Lab, model: Path, adapter_folders: list[Path]) -> None:
    a, b = (lab.runtime.load_adapter(name, path) for name, path in zip("ab", adapter_folders, strict=True))
    prompts = encoded(lab)
    samples = lab.generate(prompts, 3, [a, None, b], max_tokens=12, seed=5, ignore_eos=True)
    for prompt, chunks, folder in zip(prompts, samples, [adapter_folders[0], None, adapter_folders[1]], strict=True):
        for chunk in chunks:
            assert_trainer_agrees(model, folder, prompt, chunk, 1.0)


def test_top_k_and_top_p_logprobs_are_those_of_the_processed_distribution(lab: Lab, model: Path) -> None:
    prompt = encoded(lab)[0]
    [[chunk]] = lab.generate([prompt], 1, max_tokens=16, temperature=0.8, top_k=5, top_p=0.9, seed=1, ignore_eos=True)
    _, rows = trainer_logprobs(model, None, prompt + chunk.token_ids, 0.8)
    for at, (token, logprob) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
        values, tokens = rows[len(prompt) - 1 + at].topk(5)
        shares = values.softmax(0)
        kept = (shares.cumsum(0) - shares) < 0.9
        expected = torch.log(shares / shares[kept].sum())
        place = tokens.tolist().index(token)
        assert kept[place]
        assert abs(float(expected[place]) - logprob) < TOLERANCE


def test_scores_equal_the_trainers(lab: Lab, model: Path, adapter_folders: list[Path]) -> None:
    a = lab.runtime.load_adapter("a", adapter_folders[0])
    sequences = [*encoded(lab), [5]]
    for adapter, folder, temperature in [(None, None, 1.0), (a, adapter_folders[0], 1.0), (a, adapter_folders[0], 0.5)]:
        scored = lab.score(sequences, [adapter] * len(sequences), temperature, top=3)
        for tokens, result in zip(sequences, scored, strict=True):
            expected, rows = trainer_logprobs(model, folder, tokens, temperature)
            assert result.logprobs.dtype == np.float32
            assert np.isnan(result.logprobs[0])
            assert np.abs(result.logprobs - expected)[1:].max(initial=0) < TOLERANCE
            for at in range(1, len(tokens)):
                assert [token for token, _ in result.top[at]] == rows[at - 1].topk(3).indices.tolist()
                assert result.ranks[at] == int((rows[at - 1] > rows[at - 1, tokens[at]]).sum()) + 1


def test_scores_of_a_mixed_batch(lab: Lab, model: Path, adapter_folders: list[Path]) -> None:
    a, b = (lab.runtime.load_adapter(name, path) for name, path in zip("ab", adapter_folders, strict=True))
    sequences = encoded(lab) * 2
    adapters, folders = [a, None, b, b, a, None], [0, None, 1, 1, 0, None]
    for tokens, result, folder in zip(sequences, lab.score(sequences, adapters), folders, strict=True):
        expected, _ = trainer_logprobs(model, None if folder is None else adapter_folders[folder], tokens)
        assert np.abs(result.logprobs - expected)[1:].max() < TOLERANCE


def test_scores_of_sequences_that_begin_alike(lab: Lab, model: Path, adapter_folders: list[Path]) -> None:
    a = lab.runtime.load_adapter("a", adapter_folders[0])
    long, other = encoded(lab)[2], encoded(lab)[0] * 3
    sequences = [[*long, 5, 6, 7], other, [*long, 9], long[:20] + [8] * 40, other + [4] * 30, long, [3, 4], [*long, 9]]
    adapters = [None, a, None, None, a, None, None, a]
    for tokens, adapter, result in zip(sequences, adapters, lab.score(sequences, adapters, 0.8), strict=True):
        expected, _ = trainer_logprobs(model, adapter_folders[0] if adapter else None, tokens, 0.8)
        assert np.abs(result.logprobs - expected)[1:].max() < TOLERANCE


def test_a_seed_gives_the_same_answer_whatever_else_is_in_the_batch(lab: Lab) -> None:
    prompts = encoded(lab)
    [alone] = lab.generate([prompts[0]], 2, max_tokens=20, seed=11)
    together = lab.generate(prompts, 2, max_tokens=20, seed=11)
    other = lab.generate([prompts[0]], 2, max_tokens=20, seed=12)
    assert [chunk.token_ids for chunk in together[0]] == [chunk.token_ids for chunk in alone]
    assert [chunk.token_ids for chunk in other[0]] != [chunk.token_ids for chunk in alone]


def test_more_samples_than_rows_are_all_answered(lab: Lab, model: Path) -> None:
    prompts = encoded(lab)
    samples = lab.generate(prompts * 3, 7, max_tokens=10, seed=2, temperature=0.9)
    assert [[chunk.index for chunk in chunks] for chunks in samples] == [list(range(7))] * 9
    for prompt, chunks in zip(prompts * 3, samples, strict=True):
        assert_trainer_agrees(model, None, prompt, chunks[6], 0.9)


def test_requests_join_a_running_batch_and_short_ones_leave_it(lab: Lab, model: Path) -> None:
    results: queue.Queue[tuple[str, Any]] = queue.Queue()
    long, short, _ = encoded(lab)
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    lab.engine.submit(GenerateJob(long, params, 2, None, True, lambda result: results.put(("long", result))))
    kind, first = results.get(timeout=30)
    assert kind == "long" and first.finish_reason is None
    quick = SamplingParams(max_tokens=2, seed=1, ignore_eos=True)
    lab.engine.submit(GenerateJob(short, quick, 3, None, False, lambda result: results.put(("short", result))))
    lab.engine.submit(ScoreJob(short * 5, 1.0, 0, None, lambda result: results.put(("score", result))))
    order, tokens, logprobs, finished = [], {0: [], 1: []}, {0: [], 1: []}, 0
    tokens[first.index] += first.token_ids
    logprobs[first.index] += first.logprobs
    while finished < 6:
        kind, result = results.get(timeout=60)
        if kind == "long":
            tokens[result.index] += result.token_ids
            logprobs[result.index] += result.logprobs
        if kind == "score" or result.finish_reason:
            order.append(kind)
            finished += 1
    assert sorted(order[:4]) == ["score", "short", "short", "short"]
    for index in (0, 1):  # rows that moved in the cache while others left are still right
        whole = GeneratedChunk(index, tokens[index], logprobs[index], None, None, None, None)
        assert len(whole.token_ids) == 200
        assert_trainer_agrees(model, None, long, whole, 1.0)


def test_stop_conditions(lab: Lab) -> None:
    prompt = encoded(lab)[0]
    [[free]] = lab.generate([prompt], max_tokens=30, seed=4, ignore_eos=True)
    assert (free.finish_reason, len(free.token_ids)) == ("length", 30)
    stop_token = free.token_ids[6]
    first = free.token_ids.index(stop_token)
    [[chunk]] = lab.generate([prompt], max_tokens=30, seed=4, ignore_eos=True, stop_token_ids=frozenset([stop_token]))
    assert (chunk.finish_reason, chunk.stop_reason) == ("stop", stop_token)
    assert chunk.token_ids == free.token_ids[: first + 1]
    text = lab.runtime.tokenizer.decode(free.token_ids, skip_special_tokens=True)
    stop = text[10:13]
    [[chunk]] = lab.generate([prompt], max_tokens=30, seed=4, ignore_eos=True, stop=(stop,))
    assert (chunk.finish_reason, chunk.stop_reason) == ("stop", stop)
    assert chunk.text == text[: text.index(stop)]
    assert chunk.token_ids == free.token_ids[: len(chunk.token_ids)] and len(chunk.token_ids) < 30


def test_the_end_token_is_part_of_the_answer(lab: Lab) -> None:
    eos = lab.runtime.tokenizer.eos_token_id
    samples = lab.generate([encoded(lab)[0]], 12, max_tokens=120, seed=9)[0]
    ended = [chunk for chunk in samples if chunk.finish_reason == "stop"]
    assert ended, "no sample ended by itself; choose another seed"
    for chunk in ended:
        assert chunk.token_ids[-1] == eos and eos not in chunk.token_ids[:-1]
        assert chunk.stop_reason is None


def test_a_cancelled_request_leaves_the_batch(lab: Lab) -> None:
    seen: queue.Queue[Any] = queue.Queue()
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    job = GenerateJob(encoded(lab)[1], params, 4, None, True, seen.put)
    lab.engine.submit(job)
    seen.get(timeout=30)
    lab.engine.cancel(job)
    deadline = time.monotonic() + 30
    while lab.engine.stats.running:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert all(chunk.finish_reason is None for chunk in list(seen.queue))


def test_a_broken_adapter_fails_its_request_and_no_other(lab: Lab, model: Path, adapter_folders: list[Path]) -> None:
    good = lab.runtime.load_adapter("good", adapter_folders[0])
    broken = lab.runtime.load_adapter("broken", adapter_folders[0])
    for a, b in broken.weights.values():
        a.mul_(1e25)
        b.mul_(1e25)
    prompts = encoded(lab)
    failures: queue.Queue[Any] = queue.Queue()
    lab.engine.submit(GenerateJob(prompts[2], SamplingParams(max_tokens=5), 8, broken, False, failures.put))
    samples = lab.generate(prompts, 2, [good] * 3, max_tokens=12, seed=1, ignore_eos=True)
    error = failures.get(timeout=30)
    assert isinstance(error, EngineError) and "'broken'" in str(error)
    again = lab.generate(prompts, 4, [good] * 3, max_tokens=12, seed=1, ignore_eos=True)  # in the same cache rows
    for prompt, chunks in [*zip(prompts, samples, strict=True), *zip(prompts, again, strict=True)]:
        for chunk in chunks:
            assert_trainer_agrees(model, adapter_folders[0], prompt, chunk, 1.0)


def test_a_request_given_up_while_its_adapter_breaks_leaves_no_trace(
    model: Path, adapter_folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(model)
    broken = lab.runtime.load_adapter("broken", adapter_folders[0])
    for a, b in broken.weights.values():
        a.mul_(1e25)
        b.mul_(1e25)
    prompts, seen, begun = encoded(lab), queue.Queue[Any](), queue.Queue[Any]()
    given_up = GenerateJob(prompts[2], SamplingParams(max_tokens=5), 2, broken, False, seen.put)
    # Longer than the others: their rows are padded to its length.
    endless = SamplingParams(max_tokens=300, ignore_eos=True)
    running = GenerateJob(prompts[2] * 2, endless, 1, None, True, begun.put)
    logits, computed = lab.runtime.logits, threading.Event()

    def cancelling(hidden: torch.Tensor) -> torch.Tensor:
        if any(row.job is given_up for row in lab.engine._rows):
            given_up.cancelled = True  # as another thread does, in the middle of a step
            computed.set()
        return logits(hidden)

    monkeypatch.setattr(lab.runtime, "logits", cancelling)
    lab.engine.start()
    try:
        lab.engine.submit(running)
        begun.get(timeout=30)
        lab.engine.submit(given_up)
        assert computed.wait(30)
        [chunks] = lab.generate([prompts[1]], 2, max_tokens=12, seed=1, ignore_eos=True)  # in the same cache rows
        for chunk in chunks:
            assert_trainer_agrees(model, None, prompts[1], chunk, 1.0)
        assert seen.empty()
    finally:
        lab.engine.stop()


def test_the_next_turn_of_a_session_computes_only_what_is_new(model: Path, adapter_folders: list[Path]) -> None:
    lab = Lab(model)
    lab.engine.start()
    a = lab.runtime.load_adapter("a", adapter_folders[0])
    stats, said = lab.engine.stats, encoded(lab)
    try:
        for version, folder in ((a, adapter_folders[0]), (None, None)):
            prompt, computed = list(said[2]), 0
            for turn in range(3):
                before = stats.prompt_tokens, stats.reused_tokens
                [[chunk]] = lab.generate([prompt], 1, [version], max_tokens=8, seed=turn, ignore_eos=True)
                assert_trainer_agrees(model, folder, prompt, chunk, 1.0)
                assert (stats.prompt_tokens - before[0], stats.reused_tokens - before[1]) == (
                    len(prompt) - computed,
                    computed,
                )
                computed = len(prompt) + 7  # the last token was drawn, and not computed
                prompt = [*prompt, *chunk.token_ids, *said[0]]
        # Several at once, of which some begin like an ended sequence.
        prompts = [prompt, said[1], [*prompt[:40], 7, 8, 9], said[0]]
        samples = lab.generate(prompts, 3, [a, None, a, a], max_tokens=12, seed=5, ignore_eos=True)
        for asked, chunks, folder in zip(
            prompts, samples, [adapter_folders[0], None, *adapter_folders[:1] * 2], strict=True
        ):
            for chunk in chunks:
                assert_trainer_agrees(model, folder, asked, chunk, 1.0)
    finally:
        lab.engine.stop()


def test_long_prompts_are_computed_in_chunks_while_others_decode(model: Path, adapter_folders: list[Path]) -> None:
    lab = Lab(model, chunk_tokens=16)
    a = lab.runtime.load_adapter("a", adapter_folders[0])
    long = encoded(lab)[2] * 4
    seen: queue.Queue[tuple[str, Any]] = queue.Queue()
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    running = GenerateJob([5, 6], params, 1, None, True, lambda result: seen.put(("running", result)))
    other = GenerateJob(long, SamplingParams(max_tokens=4), 2, a, True, lambda result: seen.put(("long", result)))
    lab.engine.start()
    try:
        lab.engine.submit(running)
        kinds = [seen.get(timeout=30)[0]]
        lab.engine.submit(other)
        while kinds[-1] == "running":
            kinds.append(seen.get(timeout=30)[0])
        assert len(kinds) - 1 >= (len(long) - 1) // 16, "a token was decoded after each chunk"
        lab.engine.cancel(running)
        prompts = [long[3:], encoded(lab)[0], [9, *long], [*long[:90], 4, 5]]
        samples = lab.generate(prompts, 3, [a, None, None, a], max_tokens=12, seed=5, ignore_eos=True)
        for asked, chunks, folder in zip(
            prompts, samples, [adapter_folders[0], None, None, adapter_folders[0]], strict=True
        ):
            for chunk in chunks:
                assert_trainer_agrees(model, folder, asked, chunk, 1.0)
    finally:
        lab.engine.stop()


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_a_long_prompt_with_more_samples_than_rows_is_computed_once(
    model: Path, adapter_folders: list[Path], prefix_bytes: int
) -> None:
    lab = Lab(model, chunk_tokens=16, max_batch=2, prefix_bytes=prefix_bytes)
    lab.engine.start()
    a = lab.runtime.load_adapter("a", adapter_folders[0])
    long = encoded(lab)[2] * 4
    try:
        [chunks] = lab.generate([long], 5, [a], max_tokens=6, seed=3, ignore_eos=True)
        for chunk in chunks:
            assert_trainer_agrees(model, adapter_folders[0], long, chunk, 1.0)
        assert lab.engine.stats.prompt_tokens < len(long) + 3 * 16
    finally:
        lab.engine.stop()


def test_a_long_prompt_that_fails_or_is_given_up_holds_no_other(
    model: Path, adapter_folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(model, chunk_tokens=16)
    a = lab.runtime.load_adapter("a", adapter_folders[0])
    long, seen = encoded(lab)[2] * 4, queue.Queue[Any]()
    compute = LongPrompt.compute
    begun, cancelled, chunks = threading.Event(), threading.Event(), []

    def failing(prompt: LongPrompt, count: int) -> None:
        if prompt.job.adapter is a:
            raise MemoryError("no memory for it")
        if prompt.job is given_up:
            chunks.append(count)
            begun.set()
            cancelled.wait(30)
        compute(prompt, count)

    monkeypatch.setattr(LongPrompt, "compute", failing)
    given_up = GenerateJob(long, SamplingParams(max_tokens=4), 1, None, False, seen.put)
    lab.engine.start()
    try:
        for job in (GenerateJob(long, SamplingParams(max_tokens=4), 1, a, False, seen.put), given_up):
            lab.engine.submit(job)
        failed = seen.get(timeout=30)
        assert begun.wait(30)
        lab.engine.cancel(given_up)
        cancelled.set()
        assert isinstance(failed, EngineError) and "no memory for it" in str(failed)
        [[chunk]] = lab.generate([long], 1, [None], max_tokens=8, seed=1, ignore_eos=True)
        assert_trainer_agrees(model, None, long, chunk, 1.0)
        assert len(chunks) == 1, "nothing more of it was computed"
    finally:
        lab.engine.stop()


def test_stopping_fails_what_is_in_flight(model: Path) -> None:
    lab = Lab(model)
    lab.engine.start()
    seen: queue.Queue[Any] = queue.Queue()
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    lab.engine.submit(GenerateJob(encoded(lab)[0], params, 2, None, True, seen.put))
    seen.get(timeout=30)
    lab.engine.stop()
    assert not lab.engine.alive
    results = list(seen.queue)
    assert isinstance(results[-1], EngineStopped)
    with pytest.raises(EngineStopped):
        lab.engine.submit(GenerateJob([1], params, 1, None, False, seen.put))


def test_a_full_queue_refuses(model: Path) -> None:
    lab = Lab(model, max_queue=2)
    lab.engine.start()
    try:
        job = lambda: GenerateJob([1] * 8, SamplingParams(max_tokens=300, ignore_eos=True), 64, None, False, print)  # noqa: E731
        with pytest.raises(EngineStopped, match="waiting"):
            for _ in range(10):
                lab.engine.submit(job())
    finally:
        lab.engine.stop()


def test_little_cache_memory_only_means_smaller_batches(model: Path) -> None:
    lab = Lab(model, cache_bytes=1)
    lab.engine.start()
    try:
        prompts = encoded(lab)
        for prompt, chunks in zip(prompts, lab.generate(prompts, 3, max_tokens=150, seed=1), strict=True):
            for chunk in chunks:
                assert_trainer_agrees(model, None, prompt, chunk, 1.0)
    finally:
        lab.engine.stop()


def altered(folder: Path, into: Path, config: dict[str, Any] | None = None, weights: Any = None) -> Path:
    shutil.copytree(folder, into)
    if config:
        file = into / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if weights:
        tensors = load_file(into / "adapter_model.safetensors")
        weights(tensors)
        save_file(tensors, into / "adapter_model.safetensors")
    return into


def test_adapters_that_cannot_be_served_are_refused(lab: Lab, adapter_folders: list[Path], tmp_path: Path) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        next(iter(tensors.values()))[0, 0] = float("nan")

    def misshape(tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if key.endswith("lora_A.weight"))
        tensors[key] = torch.zeros(4, 7)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace("layers.0", "layers.9")] = tensors.pop(key)

    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(key for key in tensors if "lora_B" in key)]

    source = adapter_folders[0]
    cases = [
        ({"use_dora": True}, None, "use_dora"),
        ({"peft_type": "IA3"}, None, "IA3"),
        ({"r": 5}, None, "rank 4"),
        (None, poison, "NaN"),
        (None, misshape, "another model"),
        (None, rename, "no linear layer"),
        (None, lose, "lacks lora_B"),
    ]
    for number, (config, weights, message) in enumerate(cases):
        with pytest.raises(AdapterRefused, match=message):
            lab.runtime.load_adapter("x", altered(source, tmp_path / str(number), config, weights))
    with pytest.raises(AdapterMissing, match=r"adapter_config\.json"):
        lab.runtime.load_adapter("x", tmp_path / "nowhere")
    torn = altered(source, tmp_path / "torn")
    content = (torn / "adapter_model.safetensors").read_bytes()
    (torn / "adapter_model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(AdapterRefused, match="not a safetensors file"):
        lab.runtime.load_adapter("x", torn)


def test_rank_and_alpha_patterns(lab: Lab, model: Path, tmp_path: Path) -> None:
    options = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 32}}
    folder = make_adapter(model, tmp_path / "patterns", seed=4, **options)
    adapter = lab.runtime.load_adapter("patterns", folder)
    prompt = encoded(lab)[0]
    [scored] = lab.score([prompt], [adapter])
    expected, _ = trainer_logprobs(model, folder, prompt)
    assert np.abs(scored.logprobs - expected)[1:].max() < TOLERANCE


def test_the_adapter_cache_is_bounded_and_replaces_by_name(lab: Lab, adapter_folders: list[Path]) -> None:
    loaded = [lab.adapters.load(f"p@v{n}", str(adapter_folders[0])) for n in range(3)]
    with pytest.raises(AdapterCacheFull, match="3 adapters are loaded"):
        lab.adapters.load("p@v3", str(adapter_folders[0]))
    assert lab.adapters.load("p@v1", str(adapter_folders[1])).sha256 != loaded[1].sha256
    assert lab.adapters.unload("p@v0") is loaded[0]
    assert lab.adapters.unload("p@v0") is None
    assert [adapter.name for adapter in lab.adapters.all()] == ["p@v1", "p@v2"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_adapters_of_other_architectures_are_served_exactly(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2}
    plain = {"sliding_window": None, "eos_token_id": 2, "pad_token_id": 2, "bos_token_id": None}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes, **plain)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    folder = make_adapter(tmp_path / "model", tmp_path / "adapter", seed=3)
    lab = Lab(tmp_path / "model")
    lab.engine.start()
    try:
        adapter = lab.runtime.load_adapter("x", folder)
        prompts = encoded(lab)
        samples = lab.generate(prompts, 2, [adapter] * 3, max_tokens=8, seed=1, ignore_eos=True)
        for prompt, chunks in zip(prompts, samples, strict=True):
            for chunk in chunks:
                assert_trainer_agrees(tmp_path / "model", folder, prompt, chunk, 1.0)
    finally:
        lab.engine.stop()


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    config.sliding_window = 8
    MistralForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="full attention only"):
        Lab(tmp_path)
