"""Java archives of the embedded Kafka broker: a pinned closure, fetched once from Maven Central, checked by sha256.

The closure is listed instead of resolved: resolving takes a minute and picks other transitive versions than Maven.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

KAFKA_VERSION = "4.1.0"
MANIFEST = Path(__file__).with_name("kafka_jars.txt")
_MARKER = ".complete.json"
_THREADS = 8
_ATTEMPTS = 3

Progress = Callable[[int, int, str], None]


class JarError(RuntimeError):
    """The broker's archives could not be fetched, or have wrong checksums. The message has the remedy."""


@dataclass(frozen=True, slots=True)
class Jar:
    """A pinned archive: Maven coordinates and the sha256 of its bytes (lower-case hex)."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    @property
    def coordinates(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


# Fetches one archive into the given folder and returns its path. Replaceable, so that tests can simulate failures.
Fetch = Callable[[Jar, Path], Path]


def cache_dir() -> Path:
    """Returns the download cache: `TENTALIS_CACHE`, or `~/.cache/tentalis`."""
    from tentalis.service.settings import Settings

    return Settings.from_env().cache


def pinned_jars(manifest: Path = MANIFEST) -> list[Jar]:
    """Reads the pinned closure: one `group:artifact:version sha256` per line.

    Raises:
        JarError: a line has another format.
    """
    jars = []
    for number, line in enumerate(manifest.read_text().splitlines(), 1):
        if not line.strip():
            continue
        fields = line.replace(" ", ":").split(":")
        if len(fields) != 4 or len(fields[3]) != 64:
            raise JarError(f"{manifest}:{number}: expected 'group:artifact:version sha256', got {line!r}")
        jars.append(Jar(*fields))
    return jars


def fetch_jars(
    cache: Path | None = None,
    progress: Progress | None = None,
    *,
    jars: list[Jar] | None = None,
    fetch: Fetch | None = None,
) -> list[Path]:
    """Completes the closure under `CACHE/kafka-<version>/` and returns the paths in the order of the manifest.

    A complete set needs no network: names and sizes are checked against a marker file. Without it, every archive is
    hashed, and those that are missing or differ are fetched. Concurrent callers are safe.

    Args:
        cache: the cache directory, by default `cache_dir()`.
        progress: called with (archives done, total archives, file name) from the calling thread.
        jars, fetch: override the closure and the function that gets one archive.

    Raises:
        JarError: an archive could not be fetched, or its checksum is wrong.
    """
    wanted = pinned_jars() if jars is None else jars
    folder = (cache_dir() if cache is None else cache) / f"kafka-{KAFKA_VERSION}"
    report: Progress = progress or (lambda done, total, name: None)
    try:
        if not _complete(folder, wanted):
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_name(f"{folder.name}.lock")):
                if not _complete(folder, wanted):  # another process may have filled it while we waited
                    _fill(folder, wanted, fetch or _fetch_from_central, report)
    except OSError as error:
        raise JarError(
            f"cannot store the Kafka archives in {folder}: {error}. Set TENTALIS_CACHE to a writable folder."
        ) from error
    report(len(wanted), len(wanted), "")
    return [folder / jar.filename for jar in wanted]


def _fill(folder: Path, wanted: list[Jar], fetch: Fetch, report: Progress) -> None:
    for left_over in folder.glob("fetch-*"):  # of an interrupted process: no other one runs while we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    missing = [jar for jar in wanted if not _matches(folder / jar.filename, jar)]
    done = len(wanted) - len(missing)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder, ignore_cleanup_errors=True) as scratch:
        for jar, error in _each_stored(missing, folder, Path(scratch), fetch):
            if isinstance(error, JarError):
                raise error
            if error is not None:
                raise JarError(
                    f"the embedded Kafka broker needs {len(wanted)} Java archives; {len(wanted) - done} are missing "
                    f"in {folder}, and {jar.coordinates} could not be fetched from Maven Central "
                    f"({type(error).__name__}: {str(error)[:300]}). Connect to the network once, or set TENTALIS_CACHE "
                    "to a cache that was filled elsewhere, or TENTALIS_BOOTSTRAP to the address of another Kafka."
                ) from error
            done += 1
            report(done, len(wanted), jar.filename)
    _write_marker(folder, wanted)


def _each_stored(
    missing: Sequence[Jar], folder: Path, scratch: Path, fetch: Fetch
) -> Iterator[tuple[Jar, Exception | None]]:
    """Fetches several archives at a time and yields each when done. Stops at the first error, since a network failure
    rarely concerns one archive only."""
    results: SimpleQueue[tuple[Jar, Exception | None]] = SimpleQueue()
    todo: SimpleQueue[Jar] = SimpleQueue()
    for jar in missing:
        todo.put(jar)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                jar = todo.get_nowait()
            except Empty:
                return
            try:
                _store(jar, folder, scratch, fetch)
                results.put((jar, None))
            except Exception as error:  # noqa: BLE001 - passed to the caller with the results
                stop.set()
                results.put((jar, error))

    # No thread pool: Ctrl-C would wait for its threads, and these for a network that does not answer.
    for number in range(min(_THREADS, len(missing))):
        threading.Thread(target=work, name=f"jars-{number}", daemon=True).start()
    try:
        for _ in missing:
            yield results.get()
    finally:
        stop.set()


def _store(jar: Jar, folder: Path, scratch: Path, fetch: Fetch) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        place = scratch / f"{jar.artifact}-{attempt}"
        try:
            path = fetch(jar, place)
            break
        except Exception:  # any error of the client; raised again after the last attempt
            shutil.rmtree(place, ignore_errors=True)
            if attempt == _ATTEMPTS:
                raise
    digest = sha256_of(path)
    if digest != jar.sha256:
        raise JarError(
            f"{jar.coordinates} has the wrong checksum: expected sha256 {jar.sha256}, got {digest}. "
            "It was not stored. A proxy or mirror may have altered it; retry from another network."
        )
    path.replace(folder / jar.filename)


def _fetch_from_central(jar: Jar, place: Path) -> Path:
    from jgo.maven import MavenContext  # imported here: it takes a tenth of a second, and only the first start needs it

    context = MavenContext(repo_cache=place, timeout=20)
    path: Path = context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()
    return path


def sha256_of(path: Path) -> str:
    """Returns the lower-case hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _matches(path: Path, jar: Jar) -> bool:
    return path.is_file() and sha256_of(path) == jar.sha256


def _complete(folder: Path, wanted: list[Jar]) -> bool:
    """Checks quickly that the marker is of this closure and that every archive has the recorded size."""
    try:
        marker = json.loads((folder / _MARKER).read_text())
        return all(
            marker[jar.filename] == [jar.sha256, (folder / jar.filename).stat().st_size] for jar in wanted
        )  # a marker of another closure lacks a name or has another digest
    except (FileNotFoundError, KeyError, json.JSONDecodeError):
        return False


def _write_marker(folder: Path, wanted: list[Jar]) -> None:
    sizes = {jar.filename: [jar.sha256, (folder / jar.filename).stat().st_size] for jar in wanted}
    temporary = folder / f"{_MARKER}.{os.getpid()}"
    temporary.write_text(json.dumps(sizes, indent=1))
    temporary.replace(folder / _MARKER)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
