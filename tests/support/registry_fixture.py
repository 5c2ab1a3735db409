"""The schema registry of the tests.

Its tests are in one file, for which the first available of these is used: `TENTALIS_TEST_REGISTRY` (the URL of a
running registry, empty or with Tentalis schemas only); a container, if a Docker engine answers and has the image or can
pull it (`TENTALIS_TEST_REGISTRY_IMAGE` names another Apicurio image); Apicurio as a process, if its distribution is
cached or can be fetched; the registry of `tests/support/schema_registry.py`, with a warning that gives the reasons.
`TENTALIS_TEST_REGISTRY=container`, `=process` or `=own` selects one of them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest

from tests.support.apicurio import API, VERSION, NotToBeHad, answers, apicurio
from tests.support.http_server import serving
from tests.support.kafka_fixture import docker_answers, eventually, no_image
from tests.support.schema_registry import schema_registry

RULE = "BACKWARD_TRANSITIVE"


@dataclass(frozen=True)
class Registry:
    """A schema registry to test against, which enforces BACKWARD_TRANSITIVE."""

    url: str
    kind: str  # given | container | process | own


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A schema registry for a file of tests; a real one if available."""
    wanted = os.environ.get("TENTALIS_TEST_REGISTRY", "")
    if wanted not in ("", "container", "process", "own"):
        url = wanted.rstrip("/")
        eventually(lambda: answers(url), 30, message=f"no schema registry answers on TENTALIS_TEST_REGISTRY={url}")
        _strict(url)
        yield Registry(url, "given")
        return
    why = []
    if wanted in ("", "container"):
        image = os.environ.get("TENTALIS_TEST_REGISTRY_IMAGE", f"apicurio/apicurio-registry:{VERSION}")
        reason = no_image(image) if docker_answers() else "no Docker engine answers"
        if reason is None:
            with _container(image) as url:
                _strict(url)
                yield Registry(url, "container")
            return
        why.append(reason)
    if wanted in ("", "process"):
        try:
            with apicurio(tmp_path_factory.mktemp("registry")) as url:
                _strict(url)
                yield Registry(url, "process")
            return
        except NotToBeHad as error:
            why.append(str(error))
    assert wanted in ("", "own"), f"TENTALIS_TEST_REGISTRY={wanted}: {'; '.join(why)}"
    if why:
        warnings.warn(f"using the tests' own schema registry instead of a real one: {'; '.join(why)}", stacklevel=1)
    with schema_registry() as own:
        yield Registry(own.url, "own")


@contextmanager
def _container(image: str) -> Iterator[str]:
    from testcontainers.core.container import DockerContainer

    with DockerContainer(image).with_exposed_ports(8080) as container:
        url = f"http://{container.get_container_host_ip()}:{container.get_exposed_port(8080)}{API}"
        eventually(lambda: answers(url), 120, 0.2, lambda: str(container.get_logs()))
        yield url


def _strict(url: str) -> None:
    httpx.put(f"{url}/config", json={"compatibility": RULE}, timeout=30).raise_for_status()


class Door:
    """A proxy in front of a registry. `shut`: every response is a 503; `knocks`: number of requests."""

    def __init__(self, registry: str) -> None:
        self.registry, self.url = registry, ""
        self.shut, self.knocks = False, 0
        self.client = httpx.Client(timeout=60)

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body of the response to a request."""
        self.knocks += 1
        if self.shut:
            return 503, "application/json", json.dumps({"error_code": 50301, "message": "shut"}).encode()
        passed = {name: value for name in ("Content-Type", "Accept") if (value := headers.get(name))}
        found = self.client.request(method, self.registry + path, headers=passed, content=body)
        return found.status_code, found.headers.get("content-type", "application/json"), found.content


@contextmanager
def door(registry: str) -> Iterator[Door]:
    """Serves a proxy in front of the registry at this URL, on a free port, until the block ends."""
    made = Door(registry)
    with made.client, serving(made.answer) as made.url:
        yield made
