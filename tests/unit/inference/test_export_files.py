"""Exported adapters: the GGUF file read back, the merged model's logits, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from schemas.ids import sha256_hex
from schemas.records import PolicyUpdate
from tentalis.inference.gguf_adapter import write_gguf_adapter
from tentalis.inference.lora import AdapterRefused
from tentalis.inference.models import model_digest
from tentalis.policies.export import PROVENANCE, ExportFormat, ExportRefused, export_version
from tentalis.policies.replica import AdapterRejected
from tentalis.storage.file_cache import FileCache
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.inference_lab import make_adapter, make_model
from tests.support.loop_records import update

HEADS = {"q_proj": 4, "k_proj": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("lora") / "adapter", seed=1)


def published(adapter: Path, model: Path) -> PolicyUpdate:
    sha256 = sha256_hex((adapter / ADAPTER_WEIGHTS).read_bytes())
    return update(3, location=adapter.as_uri(), sha256=sha256, base_sha256=model_digest(model), base_model="tiny")


def with_adapter(model: Path, adapter: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter))


def changes(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The change of each layer's weight, as PEFT computes it."""
    modules = with_adapter(model, adapter).base_model.model.named_modules()
    return {name: each.get_delta_weight("default") for name, each in modules if hasattr(each, "get_delta_weight")}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"r": 8, "lora_alpha": 4, "use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5}},
        {"target_modules": ["q_proj", "v_proj"]},
    ],
    ids=str,
)
def test_a_gguf_adapter_read_back_changes_every_layer_as_peft_does(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    import gguf

    folder = make_adapter(model, tmp_path / "adapter", seed=2, **options)
    written = write_gguf_adapter(folder, model, tmp_path / "a.gguf", "assistant@v3")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert (fields["general.type"], fields["adapter.type"], fields["general.name"]) == (
        "adapter",
        "lora",
        "assistant@v3",
    )
    tensors = {each.name: np.array(each.data) for each in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    expected = changes(model, folder)
    assert written.layers == len(expected) == len(tensors) / 2
    for module, change in expected.items():
        layer = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        a, b = tensors[f"{layer}.lora_a"], tensors[f"{layer}.lora_b"]
        found = fields["adapter.lora.alpha"] / a.shape[0] * (b @ a)
        heads = HEADS.get(module.rpartition(".")[2])
        wanted = change.numpy()
        if heads is not None:  # llama.cpp's order: the two rotary halves of each head interleaved
            rows = wanted.shape[0] // heads
            order = [
                head * rows + half * rows // 2 + i for head in range(heads) for i in range(rows // 2) for half in (0, 1)
            ]
            wanted = wanted[order]
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_merged_model_has_the_logits_of_base_and_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    done = export_version(
        published(adapter, model), ExportFormat.MERGED, tmp_path / "out", FileCache(tmp_path / "c", 1), model
    )
    assert {"model.safetensors", "config.json", "tokenizer.json", PROVENANCE} <= set(done.files)
    ids = torch.tensor([[5, 17, 200, 33, 90]])
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits
        expected = with_adapter(model, adapter).eval()(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
    assert torch.max(torch.abs(merged - expected)) < 1e-3
    assert torch.max(torch.abs(base - expected)) > 0.1


def test_a_peft_folder_and_a_gguf_folder_name_their_version(model: Path, adapter: Path, tmp_path: Path) -> None:
    of, cache = published(adapter, model), FileCache(tmp_path / "c", 1)
    plain = export_version(of, ExportFormat.SAFETENSORS, tmp_path / "plain", cache, None)
    assert (plain.folder / ADAPTER_WEIGHTS).read_bytes() == (adapter / ADAPTER_WEIGHTS).read_bytes()
    assert json.loads((plain.folder / PROVENANCE).read_text())["version"] == "assistant@v3"
    found = export_version(of, ExportFormat.GGUF, tmp_path / "gguf", cache, model)
    assert set(found.files) == {"assistant-v3.gguf", "Modelfile", PROVENANCE}
    assert "ADAPTER ./assistant-v3.gguf" in (found.folder / "Modelfile").read_text()


def test_a_whole_model_is_copied_and_is_no_gguf_adapter(model: Path, tmp_path: Path) -> None:
    sha256 = sha256_hex((model / "model.safetensors").read_bytes())
    of = update(3, sha256=sha256, location=model.as_uri(), rank=0)
    cache = FileCache(tmp_path / "c", 1)
    for export_format in (ExportFormat.SAFETENSORS, ExportFormat.MERGED):
        done = export_version(of, export_format, tmp_path / export_format.value, cache, None)
        assert model_digest(done.folder) == sha256 and {"config.json", "tokenizer.json", PROVENANCE} <= set(done.files)
        assert done.usage == f"vLLM: vllm serve {done.folder}"
    with pytest.raises(ExportRefused, match=r"whole model, and gguf is for adapters.*convert_hf_to_gguf"):
        export_version(of, ExportFormat.GGUF, tmp_path / "gguf", cache, None)
    with pytest.raises(AdapterRejected, match=r"model\.safetensors is damaged"):
        export_version(of.model_copy(update={"sha256": "0" * 64}), ExportFormat.MERGED, tmp_path / "bad", cache, None)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(model: Path, adapter: Path, tmp_path: Path) -> None:
    of, cache = published(adapter, model), FileCache(tmp_path / "c", 1)
    (tmp_path / "there").mkdir()
    with pytest.raises(ExportRefused, match="exists"):
        export_version(of, ExportFormat.GGUF, tmp_path / "there", cache, model)
    with pytest.raises(ExportRefused, match="other weights"):
        export_version(
            of.model_copy(update={"base_sha256": "another"}), ExportFormat.MERGED, tmp_path / "out", cache, model
        )
    with pytest.raises(AdapterRejected, match="is damaged"):
        export_version(of.model_copy(update={"sha256": "0" * 64}), ExportFormat.GGUF, tmp_path / "out", cache, model)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(AdapterRefused, match=r"type 'mamba'.*--format merged"):
        write_gguf_adapter(adapter, strange, tmp_path / "x.gguf", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["strange", "there"]
