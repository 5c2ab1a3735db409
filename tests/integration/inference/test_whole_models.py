"""Whole models beside the served one: every answer and score is of its own weights, whatever runs at the same time."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from schemas.ids import sha256_hex
from tentalis.inference.adapter_cache import AdapterCacheFull
from tentalis.inference.lora import AdapterRefused
from tentalis.inference.whole_model import WholeModel
from tests.support.inference_lab import Lab, make_adapter, make_model, running_server, trainer_logprobs

TOLERANCE = 1e-4
PROMPTS = ["What is the capital of France?", "fox", "The quick brown fox jumps over the lazy dog. " * 4, "fox"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two whole models of the same shape."""
    folders = [tmp_path_factory.mktemp("trained") / name for name in "ab"]
    for seed, folder in enumerate(folders, 1):
        make_model(folder, seed=seed)
    return folders


@pytest.fixture(scope="module")
def lab(model: Path) -> Iterator[Lab]:
    lab = Lab(model, max_batch=5)
    lab.engine.start()
    yield lab
    lab.engine.stop()


def test_answers_of_several_models_at_the_same_time_are_each_of_their_own(
    lab: Lab, model: Path, trained: list[Path], tmp_path: Path
) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", seed=1)
    versions = [lab.adapters.load(f"p@v{n}", str(folder)) for n, folder in enumerate([*trained, adapter])]
    assert [isinstance(version, WholeModel) for version in versions] == [True, True, False]
    a, b, lora = versions
    prompts = [list(lab.runtime.tokenizer.encode(text)) for text in PROMPTS]
    of = [(model, None), (trained[0], None), (model, adapter), (trained[1], None)]
    # Five rows at most: some leave while others move to their places and begin.
    for order in ([None, a, lora, b], [b, None, lora, a]):
        places = [of[[None, a, lora, b].index(version)] for version in order]
        samples = lab.generate(prompts, 3, order, max_tokens=12, seed=5, ignore_eos=True)
        scores = lab.score(
            [prompt + chunks[0].token_ids for prompt, chunks in zip(prompts, samples, strict=True)], order
        )
        for prompt, chunks, scored, (base, with_adapter) in zip(prompts, samples, scores, places, strict=True):
            for chunk in chunks:
                expected, _ = trainer_logprobs(base, with_adapter, prompt + chunk.token_ids)
                assert np.abs(expected[len(prompt) :] - np.array(chunk.logprobs)).max() < TOLERANCE
            expected, _ = trainer_logprobs(base, with_adapter, prompt + chunks[0].token_ids)
            assert np.abs(scored.logprobs - expected)[1:].max() < TOLERANCE
    for version in versions:
        lab.adapters.unload(version.name)


def test_a_version_of_another_model_is_refused(lab: Lab, trained: list[Path], tmp_path: Path) -> None:
    def altered(name: str) -> Path:
        return Path(shutil.copytree(trained[0], tmp_path / name))

    config = json.loads((trained[0] / "config.json").read_text())
    other = altered("rope")
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(AdapterRefused, match="differs from that of the served model in rms_norm_eps"):
        lab.adapters.load("x", str(other))
    tensors = load_file(trained[0] / "model.safetensors")
    name = "model.norm.weight"
    for change, message in [
        ({name: tensors[name][:-1].clone()}, r"'model\.norm\.weight' has the shape \(\d+,\), in the served"),
        ({name: torch.full_like(tensors[name], float("nan"))}, "NaN or infinity"),
    ]:
        folder = altered(message[:5].strip("'"))
        save_file(tensors | change, folder / "model.safetensors")
        with pytest.raises(AdapterRefused, match=message):
            lab.adapters.load("x", str(folder))
        shutil.rmtree(folder)
    limited = type(lab.adapters)(lab.runtime, 3, lab.adapters._files, model_limit=1)
    limited.load("x", str(trained[0]))
    limited.load("x", str(trained[1]))  # in its place
    with pytest.raises(AdapterCacheFull, match=r"1 whole models are loaded already.*--max-models"):
        limited.load("y", str(trained[0]))


def test_a_whole_model_is_loaded_over_http(model: Path, trained: list[Path]) -> None:
    lab = Lab(model)
    sha256 = sha256_hex((trained[0] / "model.safetensors").read_bytes())
    with running_server(lab) as url, httpx.Client(base_url=url, timeout=30) as client:
        load = {"lora_name": "p@v1", "lora_path": str(trained[0]), "sha256": sha256}
        assert client.post("/v1/load_lora_adapter", json=load | {"sha256": "0" * 64}).status_code == 400
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
        base, version = client.get("/v1/models").json()["data"]
        assert base["loads_models"] and (version["id"], version["sha256"]) == ("p@v1", sha256)
        body = {"model": "p@v1", "prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 1, "seed": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "p@v1"}).status_code == 200
