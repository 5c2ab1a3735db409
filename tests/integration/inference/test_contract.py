"""The contract of training with a model server: tests ours in `make test`, a real vLLM in `make test-vllm`."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from schemas.records import LogprobsMode
from tentalis.inference.client import OpenAIClient
from tentalis.inference.logprobs_check import measure_logprobs
from tentalis.inference.protocol import Generation, RequestRefused, UnknownModel
from tests.support.inference_lab import Lab, make_adapter, make_model, running_server
from tests.support.vllm_server import running_vllm

BASE = "tiny"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
VERSIONS = 4
SLOTS = 2
"""Adapters that vLLM keeps in memory at once: fewer than there are versions."""
CONTEXT = 256
TOLERANCE = 1e-4


class Reference:
    """The trainer's arithmetic: transformers and PEFT, over the base model and the adapters that the tests load."""

    def __init__(self, model: Path, adapters: Sequence[Path]) -> None:
        self.model, self.adapters = model, adapters
        base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._module = PeftModel.from_pretrained(base, str(adapters[0]), adapter_name="1")
        for number, folder in enumerate(adapters[1:], 2):
            self._module.load_adapter(str(folder), adapter_name=str(number))

    def folder(self, version: int) -> Path:
        return self.adapters[version - 1]

    def logits(self, version: int | None, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            if version is None:
                with self._module.disable_adapter():
                    return self._module(input_ids=torch.tensor([list(tokens)])).logits[0].double()
            self._module.set_adapter(str(version))
            return self._module(input_ids=torch.tensor([list(tokens)])).logits[0].double()

    def logprobs(
        self, version: int | None, tokens: Sequence[int], temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """log p of each token after the first, in the distribution that a server has to sample from."""
        rows = (self.logits(version, tokens)[:-1] / temperature).log_softmax(-1)
        ordered, order = rows.sort(dim=-1, descending=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if top_k:
            keep[:, top_k:] = False
        kept = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= kept.cumsum(-1) - kept < top_p
        allowed = torch.zeros_like(keep).scatter_(1, order, keep)
        chosen = rows.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        return chosen.gather(1, torch.tensor(tokens)[1:, None])[:, 0].numpy()


class Server(NamedTuple):
    url: str
    reference: Reference
    running_metric: str
    generated_metric: str

    def metric(self, name: str) -> float:
        lines = httpx.get(self.url + "/metrics", timeout=30).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    # 32 features per head: vLLM's kernels know no fewer.
    model = make_model(tmp_path_factory.mktemp("model") / BASE, heads=2)
    return Reference(
        model,
        [make_adapter(model, tmp_path_factory.mktemp(f"v{seed}"), seed=seed) for seed in range(1, VERSIONS + 1)],
    )


@pytest.fixture(scope="module", params=["local", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest, reference: Reference) -> Iterator[Server]:
    if request.param == "local":
        lab = Lab(reference.model)
        with running_server(lab, BASE, CONTEXT) as url:
            yield Server(url, reference, "tentalis_inference_running", "tentalis_inference_generated_tokens_total")
    else:
        with running_vllm(reference.model, "--max-model-len", str(CONTEXT), "--max-adapters", str(SLOTS)) as url:
            yield Server(url, reference, "vllm:num_requests_running", "vllm:generation_tokens_total")


def run(use: Coroutine[Any, Any, None]) -> None:
    asyncio.run(use)


@asynccontextmanager
async def client_with(server: Server, *versions: int) -> AsyncIterator[OpenAIClient]:
    """A client, while the server serves these versions."""
    async with OpenAIClient(server.url, timeout=120, check_logprobs=True) as client:
        for version in versions:
            await client.load_adapter(f"p@v{version}", str(server.reference.folder(version)))
        try:
            yield client
        finally:
            for card in await client.models():
                if card["parent"] is not None:
                    await client.unload_adapter(str(card["id"]))


def name_of(version: int | None) -> str:
    return BASE if version is None else f"p@v{version}"


def check_exact(reference: Reference, version: int | None, generation: Generation, **sampling: float) -> None:
    """Each sample has the log-probs that the trainer computes for it under this version."""
    assert generation.model == name_of(version) and generation.prompt_token_ids is not None
    prompt = generation.prompt_token_ids.tolist()
    for completion in generation.completions:
        assert completion.token_ids is not None and completion.logprobs is not None and len(completion.token_ids)
        whole = [*prompt, *completion.token_ids.tolist()]
        expected = reference.logprobs(version, whole, **sampling)[len(prompt) - 1 :]  # type: ignore[arg-type]
        assert np.abs(expected - completion.logprobs).max() < TOLERANCE, name_of(version)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.5},
    ],
    ids=lambda sampling: "-".join(f"{name}{value}" for name, value in sampling.items()),
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(
    server: Server, sampling: dict[str, Any]
) -> None:
    async def use() -> None:
        async with client_with(server, 1) as client:
            rendered = await client.render("p@v1", MESSAGES)
            chat = await client.generate("p@v1", MESSAGES, n=3, max_tokens=12, seed=3, **sampling)
            plain = await client.generate("p@v1", rendered.tolist(), n=3, max_tokens=12, seed=3, **sampling)
            for generation in (chat, plain):
                assert generation.logprobs_mode is LogprobsMode.PROCESSED
                assert np.array_equal(generation.prompt_token_ids, rendered)
                check_exact(server.reference, 1, generation, **sampling)

    run(use())


def test_what_it_declares_and_what_it_does_are_compared(server: Server) -> None:
    async def use() -> None:
        async with client_with(server) as client:
            measured = await measure_logprobs(client, BASE)
            assert measured.mode is LogprobsMode.PROCESSED, measured.reason

    run(use())


def test_versions_and_the_base_model_in_one_batch_are_not_mixed(server: Server) -> None:
    async def use() -> None:
        versions = (None, 1, 2, None, 3)
        async with client_with(server, 1, 2, 3) as client:
            for _ in range(2):  # the second time, every slot has held an adapter
                found = await asyncio.gather(
                    *(client.generate(name_of(v), MESSAGES, n=2, max_tokens=16, seed=i) for i, v in enumerate(versions))
                )
                for version, generation in zip(versions, found, strict=True):
                    check_exact(server.reference, version, generation)

    run(use())


def test_a_version_that_is_loaded_meanwhile_does_not_touch_an_answer_in_flight(server: Server) -> None:
    async def use() -> None:
        async with client_with(server, 1) as client:
            answering = asyncio.create_task(client.generate("p@v1", MESSAGES, n=2, max_tokens=200, seed=4))
            await until(lambda: server.metric(server.running_metric) > 0)
            for version in (2, 3):
                await client.load_adapter(name_of(version), str(server.reference.folder(version)))
                check_exact(
                    server.reference, version, await client.generate(name_of(version), MESSAGES, max_tokens=4, seed=1)
                )
            await client.unload_adapter("p@v1")
            check_exact(server.reference, 1, await answering)
            with pytest.raises(UnknownModel):
                await client.generate("p@v1", MESSAGES, max_tokens=1)

    run(use())


async def until(condition: Any, seconds: float = 60) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not await asyncio.to_thread(condition):
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_teacher_scores_given_tokens_or_is_refused(server: Server, temperature: float) -> None:
    async def use() -> None:
        async with client_with(server, 2) as client:
            tokens = (await client.render(BASE, MESSAGES)).tolist()
            for version in (None, 2):
                expected = server.reference.logprobs(version, tokens, temperature)
                try:
                    own, ids, top = await client.score_top(name_of(version), tokens, temperature, k=3)
                    plain = await client.score(name_of(version), tokens, temperature)
                except RequestRefused as refusal:
                    assert temperature != 1.0 and "temperature 1 only" in refusal.message
                    continue
                assert np.abs(expected - plain[1:]).max() < TOLERANCE
                assert np.abs(expected - own[1:]).max() < TOLERANCE
                rows = (server.reference.logits(version, tokens)[:-1] / temperature).log_softmax(-1)
                best = rows.topk(3, dim=-1)
                assert np.array_equal(ids[1:], best.indices.numpy())
                assert np.abs(best.values.numpy() - top[1:]).max() < TOLERANCE

    run(use())


def test_a_teacher_and_samples_share_a_batch(server: Server) -> None:
    async def use() -> None:
        async with client_with(server, 1) as client:
            tokens = (await client.render(BASE, MESSAGES)).tolist()
            generation, *scores = await asyncio.gather(
                client.generate("p@v1", MESSAGES, n=3, max_tokens=24, seed=2),
                *(client.score(BASE, tokens[: len(tokens) - cut]) for cut in range(4)),
            )
            check_exact(server.reference, 1, generation)
            for cut, found in enumerate(scores):
                expected = server.reference.logprobs(None, tokens[: len(tokens) - cut])
                assert np.abs(expected - found[1:]).max() < TOLERANCE

    run(use())


def test_a_name_serves_what_was_loaded_last(server: Server) -> None:
    async def use() -> None:
        async with client_with(server, 1) as client:
            ask = {"n": 2, "max_tokens": 8, "seed": 1}
            check_exact(server.reference, 1, await client.generate("p@v1", MESSAGES, **ask))
            with pytest.raises(RequestRefused, match="already"):
                await client.load_adapter("p@v1", str(server.reference.folder(2)))
            check_exact(server.reference, 1, await client.generate("p@v1", MESSAGES, **ask))
            await client.unload_adapter("p@v1")
            with pytest.raises(UnknownModel):
                await client.unload_adapter("p@v1")
            # Under the same name: nothing of the prompt's cache may be left.
            await client.load_adapter("p@v1", str(server.reference.folder(2)))
            [completion] = (await client.generate("p@v1", MESSAGES, max_tokens=8, seed=1)).completions
            prompt = (await client.render(BASE, MESSAGES)).tolist()
            expected = server.reference.logprobs(2, [*prompt, *completion.token_ids.tolist()])[len(prompt) - 1 :]
            assert np.abs(expected - completion.logprobs).max() < TOLERANCE

    run(use())


@pytest.mark.parametrize("fault", ["missing", "torn", "another base", "a higher rank"])
def test_an_adapter_that_cannot_be_served_is_refused_and_the_rest_goes_on(
    server: Server, fault: str, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    if fault == "torn":
        shutil.copytree(server.reference.folder(3), bad)
        weights = bad / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    elif fault == "another base":
        make_adapter(make_model(tmp_path / "other", heads=4, hidden_size=128), bad, seed=1)
    elif fault == "a higher rank":
        make_adapter(server.reference.model, bad, seed=1, r=32)

    async def use() -> None:
        async with client_with(server, 1, 2) as client:
            try:
                await client.load_adapter("p@v9", str(bad))
            except RequestRefused:
                with pytest.raises(UnknownModel):
                    await client.generate("p@v9", MESSAGES, max_tokens=1)
            else:
                assert fault == "a higher rank", "our server has no highest rank"
            for version in (None, 1, 2):
                check_exact(
                    server.reference, version, await client.generate(name_of(version), MESSAGES, max_tokens=4, seed=1)
                )

    run(use())


def test_n_samples_share_a_prompt_and_a_seed_repeats_them(server: Server) -> None:
    body = {"model": BASE, "messages": MESSAGES, "n": 4, "max_tokens": 8, "seed": 5, "return_token_ids": True}
    first, second = (httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json() for _ in range(2))
    assert first["usage"]["prompt_tokens"] == len(first["prompt_token_ids"])
    tokens = [choice["token_ids"] for choice in first["choices"]]
    assert len({tuple(each) for each in tokens}) == 4, "each sample has a seed of its own"
    assert tokens == [choice["token_ids"] for choice in second["choices"]]


def test_a_client_that_goes_away_ends_its_requests(server: Server) -> None:
    async def use() -> None:
        before = server.metric(server.generated_metric)
        async with OpenAIClient(server.url, timeout=120) as client:
            asked = asyncio.create_task(client.generate(BASE, [5, 6, 7], n=32, max_tokens=CONTEXT - 3))
            await until(lambda: server.metric(server.running_metric) > 0)
            asked.cancel()
            await asyncio.wait([asked])
        await until(lambda: server.metric(server.running_metric) == 0)
        assert server.metric(server.generated_metric) - before < 32 * (CONTEXT - 3) / 2

    run(use())


def test_tools_are_part_of_the_prompt(server: Server) -> None:
    body = {"model": BASE, "messages": MESSAGES, "max_tokens": 4, "return_token_ids": True, "logprobs": True}
    plain = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).json()
    answer = httpx.post(server.url + "/v1/chat/completions", json=body | {"tools": TOOLS}, timeout=60).json()
    tokenised = httpx.post(
        server.url + "/tokenize", json={"model": BASE, "messages": MESSAGES, "tools": TOOLS}, timeout=60
    ).json()
    assert answer["prompt_token_ids"] == tokenised["tokens"] != plain["prompt_token_ids"]
    [choice] = answer["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])


def test_unserved_models_and_too_long_prompts_are_refused(server: Server) -> None:
    async def use() -> None:
        async with OpenAIClient(server.url, timeout=60) as client:
            with pytest.raises(UnknownModel):
                await client.generate("p@v7", MESSAGES, max_tokens=1)
            with pytest.raises(RequestRefused):
                await client.generate(BASE, [5] * (CONTEXT + 1), max_tokens=4)
            assert [card["id"] for card in await client.models()] == [BASE]

    run(use())
