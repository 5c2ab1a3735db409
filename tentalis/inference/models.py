"""Resolves a model name to a folder: a path, a GGUF file, a hub id, or a model that the package index serves."""

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from tentalis.inference.gguf_model import convert_gguf
from tentalis.inference.model_download import ModelNotFound, ProgressCallback, fetch_gguf
from tentalis.inference.packaged_models import MODELS, NAMES, packaged_model
from tentalis.service.lifecycle import Unmendable

_GENERATION_FILE = "generation_config.json"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


class ModelDamaged(Unmendable):
    """A file of the model is damaged or missing; the message names it and says what to do."""


def _no_progress(activity: str, done: int, total: int | None) -> None:
    """A progress callback that does nothing."""


def resolve_model(spec: str | None, cache_dir: Path, progress: ProgressCallback | None = None) -> Path:
    """The folder that holds the model `spec` (config.json, *.safetensors, tokenizer), downloaded first if needed.

    `spec` is a folder, a GGUF file, a hub id (`owner/name`, kept in the hub's own cache), or the name of a packaged
    model (packaged_models.py); None means SmolLM2-135M-Instruct. GGUF files, those of packages too, are converted once
    to a folder in `cache_dir`/models (fp32). Concurrent processes convert a model only once. Raises ModelNotFound,
    ModelDamaged.
    """
    report = progress or _no_progress
    models = cache_dir.expanduser() / "models"
    if (named := packaged_model(spec)) is not None:
        downloads = cache_dir.expanduser() / "downloads" / named.folder

        def convert_packaged(target: Path) -> None:
            gguf = fetch_gguf(named, downloads, report)
            convert_gguf(gguf, target, named.title, named.source, report)
            shutil.rmtree(downloads)

        return _prepared(models / named.folder, convert_packaged, report)
    assert spec is not None
    path = Path(spec).expanduser().absolute()  # a GGUF file in the hub's cache is a link to a blob without a suffix
    if path.suffix == ".gguf" and path.is_file():
        stat = path.stat()
        digest = _digest_of(((str(path), stat.st_size, stat.st_mtime_ns),))
        return _prepared(
            models / f"{path.stem}-{digest[:12]}",
            lambda target: convert_gguf(path, target, path.name, str(path), report),
            report,
        )
    if path.exists():
        folder = path.resolve()
        return _checked_folder(folder, fetched=_fetched_folder(folder, cache_dir))
    if spec.count("/") != 1 or spec.startswith((".", "~", "/")) or spec.endswith(".gguf"):
        raise ModelNotFound(
            f"{spec!r} is neither a folder, nor a GGUF file, nor a hub id, nor a known name. Give a folder with "
            "config.json and *.safetensors, a .gguf file, a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct', or "
            f"one of {', '.join(NAMES)}."
        )
    return _download_from_hub(spec, report)


def model_digest(path: Path) -> str:
    """sha256 (hex) over the content of the weight files in name order: `cat *.safetensors | sha256sum`.

    Raises ModelNotFound when there are none.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{path} has no *.safetensors file.")
    stats = [(f, f.stat()) for f in files]
    return _digest_of(tuple((str(f), s.st_size, s.st_mtime_ns) for f, s in stats))


def companion_files(path: Path) -> dict[str, bytes]:
    """The files of a model folder that a server needs besides weights and config.json, by name: those of the tokenizer,
    and the generation settings."""
    found = (path / name for name in (*_TOKENIZER_FILES, _GENERATION_FILE))
    return {file.name: file.read_bytes() for file in found if file.is_file()}


def tokenizer_digest(path: Path) -> str:
    """sha256 (hex) over the existing tokenizer and chat template files: name, zero byte, sha256 of the content, in name
    order. Raises ModelNotFound when there are none."""
    digest = hashlib.sha256()
    found = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not found:
        raise ModelNotFound(f"{path} has no tokenizer files (tokenizer.json, ...).")
    for file in found:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@lru_cache(maxsize=16)
def _digest_of(files: tuple[tuple[str, int, int], ...]) -> str:
    """sha256 (hex) over files. The cache key has size and modification time, so that a changed file is read again."""
    digest = hashlib.sha256()
    for name, _, _ in files:
        with Path(name).open("rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _fetched_folder(folder: Path, cache_dir: Path) -> Path | None:
    """The folder to delete so that a model is fetched again, if it is our copy or the hub's; else None."""
    models = (cache_dir.expanduser() / "models").resolve()
    if folder.parent == models and folder.name in {model.folder for model in MODELS}:
        return folder
    # Files of a hub snapshot are links to blobs beside it. Deleting only the snapshot would link a damaged blob again.
    return folder.parents[1] if folder.parent.name == "snapshots" else None


def _checked_folder(folder: Path, fetched: Path | None) -> Path:
    remedy = (
        f"Copy the model to {folder} again, or name another with --policy-model."
        if fetched is None
        else f"Delete {fetched}: the next start fetches the model again."
    )
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is a file; give the folder that holds the model.")
    missing = [file_kind for file_kind, pattern in _REQUIRED_FILES.items() if not any(folder.glob(pattern))]
    if missing and fetched is not None:
        raise ModelDamaged(f"{folder} is incomplete: {', '.join(missing)} missing. {remedy}")
    if missing:
        raise ModelNotFound(
            f"{folder} is not a model folder: {', '.join(missing)} missing. It needs config.json, *.safetensors and a "
            "tokenizer (tokenizer.json or tokenizer_config.json), as save_pretrained() writes them."
        )
    for file in (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json"))):
        if format_error := _format_error(file):
            raise ModelDamaged(f"{file} is damaged ({format_error}). {remedy}")
    return folder


def _format_error(file: Path) -> str | None:
    """Returns the format error of a file, or None. Reads only a part of the file."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        else:
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(file, framework="numpy"):
                    pass
            except SafetensorError as error:  # the header is invalid or does not fit the file's length
                return str(error)
    except (OSError, ValueError) as error:
        return str(error)
    return None


_REQUIRED_FILES = {"config.json": "config.json", "*.safetensors": "*.safetensors", "the tokenizer": "tokenizer*"}


def _download_from_hub(repo_id: str, progress: ProgressCallback) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    progress(f"downloading {repo_id} from the hub", 0, None)
    try:
        folder = snapshot_download(
            repo_id, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*", "merges.txt"]
        )
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The hub has no model {repo_id!r} (or it is private: set HF_TOKEN), and there is no such folder here."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelNotFound(
            f"Could not download {repo_id!r} from the hub: {error}. Check the network (HF_ENDPOINT, proxies), or give "
            f"a local folder, or one of {', '.join(NAMES)}, which come from the package index."
        ) from error
    progress(f"downloading {repo_id} from the hub", 1, 1)
    return _checked_folder(Path(folder), fetched=Path(folder).parents[1])


def _prepared(target: Path, make: Callable[[Path], None], progress: ProgressCallback) -> Path:
    """The model folder `target`, which `make` makes under another name if it is not there yet."""
    if target.is_dir():
        return _checked_folder(target, fetched=target)
    models = target.parent
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{target.name}.lock", progress):
        if target.is_dir():  # another process has made it during the wait
            return _checked_folder(target, fetched=target)
        for left_over in models.glob(f".{target.name}-*"):  # left by a killed process: we hold the lock
            shutil.rmtree(left_over)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=models))
        try:
            make(work / "model")
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path, progress: ProgressCallback) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model", 0, None)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
