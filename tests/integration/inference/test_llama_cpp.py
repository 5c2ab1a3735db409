"""An exported GGUF adapter in a real llama.cpp server, against PEFT. Needs the package xllamacpp, which no extra has:
`make test-llama-cpp` installs it beside the others."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from schemas.records import Sampling, Status, not_trainable_by_ratio, sample_of
from tentalis.agents.workers.answer import Answerer
from tentalis.inference.client import OpenAIClient
from tentalis.inference.gguf_adapter import write_gguf_adapter
from tentalis.policies.served import ServedVersions
from tests.support.hf_gguf import write_gguf_model
from tests.support.inference_lab import make_adapter, make_model
from tests.support.loop_records import T0, task
from tests.support.worker_lab import policy_calls

llama_cpp: Any = pytest.importorskip("xllamacpp")

PROMPT = [5, 17, 200, 33, 90, 41, 7, 260, 12]
PRINTABLE = 5


def served(model: Path, adapter: Path | None = None) -> Any:
    """A llama.cpp server of the model, with the adapter applied."""
    params = llama_cpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.warmup = 128, 1, False
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    # Flash attention computes in half precision on a CPU: it differs by 1e-2 with and without an adapter.
    params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if adapter is not None:
        params.lora_adapters = [llama_cpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    return llama_cpp.Server(params)


def next_logprobs(server: Any, vocabulary: int) -> np.ndarray[Any, Any]:
    """The log-probs of the token after PROMPT, float32 [vocabulary]."""
    body: dict[str, Any] = {"prompt": PROMPT, "n_predict": 1, "n_probs": vocabulary, "temperature": 1.0}
    # It lists the model's own log-probs, but none if the sampled token ends the text or is half a character.
    body |= {"logit_bias": [[PRINTABLE, 1000.0]], "cache_prompt": False}
    answer = httpx.post(f"{server.listening_address}/completion", json=body, timeout=120).json()
    found = np.full(vocabulary, -np.inf, dtype=np.float32)
    for entry in answer["completion_probabilities"][0]["top_logprobs"]:
        found[entry["id"]] = entry["logprob"]
    return found


def reference(model: Path, adapter: Path | None) -> np.ndarray[Any, Any]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, str(adapter))
    with torch.no_grad():
        logits = loaded.eval()(torch.tensor([PROMPT])).logits[0, -1]
    logprobs: np.ndarray[Any, Any] = torch.log_softmax(logits, -1).numpy()
    return logprobs


@pytest.mark.parametrize("options", [None, {}, {"r": 8, "lora_alpha": 4, "use_rslora": True}], ids=str)
def test_an_exported_adapter_gives_the_log_probs_of_peft(tmp_path: Path, options: dict[str, Any] | None) -> None:
    model = make_model(tmp_path / "model")
    base = write_gguf_model(model, tmp_path / "base.gguf")
    adapter = exported = None
    if options is not None:
        adapter = make_adapter(model, tmp_path / "adapter", seed=1, **options)
        exported = write_gguf_adapter(adapter, model, tmp_path / "adapter.gguf", "assistant@v1").path
    expected = reference(model, adapter)
    found = next_logprobs(served(base, exported), len(expected))
    assert np.max(np.abs(found - expected)) < 1e-4
    if adapter is not None:
        assert np.max(np.abs(reference(model, None) - expected)) > 0.1, "the adapter matters"


def test_a_worker_answers_with_a_plain_model_and_the_answers_are_not_trainable(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    server = served(write_gguf_model(model, tmp_path / "base.gguf"))
    of = task(n=1, sampling=Sampling(max_tokens=8))

    async def answered() -> Any:
        async with OpenAIClient(server.listening_address, check_logprobs=True) as client:
            calls = policy_calls(ServedVersions("local"), model="base")
            answerer = Answerer(client, calls, worker_id="w", server_id="local")
            return await answerer.answer(of, T0)

    (result,) = asyncio.run(answered())
    assert (result.status, result.error) == (Status.OK, None)
    assert "@v" not in result.policy_spans[0].policy
    assert not_trainable_by_ratio(sample_of(result))
