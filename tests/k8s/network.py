"""The network policies of a release, tried: every pod connects to every port of every other one, and of a stranger.

`tests/unit/helm/test_reachability.py` reads the same from the policies, without a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.docker.engine import wait_for
from tests.k8s.cluster import Cluster

STRANGER, OUTSIDE = "stranger", 8080
PROBE = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def answers(address):
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True
with ThreadPoolExecutor(64) as pool:
    print(json.dumps([a for a, found in zip(sys.argv[1:], pool.map(answers, sys.argv[1:])) if found]))
"""
Pod = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Port:
    """An open port of a pod of the release."""

    component: str
    name: str
    address: str


def component(pod: Pod) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def ports(pods: Sequence[Pod]) -> Iterator[Port]:
    """Yields the ports that the containers of the pods declare."""
    for pod in pods:
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                yield Port(component(pod), port["name"], f"{pod['status']['podIP']}:{port['containerPort']}")


def asks_server(pod: Pod) -> bool:
    """True if a pod is told where the model server is."""
    container = pod["spec"]["containers"][0]
    words = [*container.get("args", ()), *(each["name"] for each in container.get("env", ()))]
    return any(word == "TENTALIS_SERVER" or word.split("=")[0] == "--server" for word in words)


def wanted(pod: Pod, port: Port) -> bool:
    """True if a pod has to reach a port: Kafka, except the model server, and the model server if it asks it."""
    if port.component == "kafka":
        return port.name == "kafka" and component(pod) != "model"
    return port.component == "model" and port.name == "http" and asks_server(pod)


def wrong(made: Cluster, namespace: str, pods: Sequence[Pod]) -> tuple[int, list[str]]:
    """Tries every connection; returns their number, and those that are open and should not be, or the reverse.

    A pod of the namespace that is not of the release may read metrics and reach the gateway, by the chart's defaults,
    and no pod of the release may reach it.
    """
    every = list(ports(pods))
    with _stranger(made, namespace, pods) as address:
        outside = Port(STRANGER, "http", f"{address}:{OUTSIDE}")
        tried, found = 0, []
        for pod in pods:
            if component(pod) == "kafka":  # has no Python
                continue
            others = [port for port in every if not port.address.startswith(f"{pod['status']['podIP']}:")]
            expected = {port: wanted(pod, port) for port in (outside, *others)}
            tried += len(expected)
            found += _differences(made, namespace, pod["metadata"]["name"], expected)
        expected = {port: port.name == "metrics" or port.component == "gateway" for port in every}
        return tried + len(expected), found + _differences(made, namespace, STRANGER, expected)


@contextmanager
def _stranger(made: Cluster, namespace: str, pods: Sequence[Pod]) -> Iterator[str]:
    """Yields the address of a pod without the labels of the release, which serves a port."""
    image = next(pod["spec"]["containers"][0]["image"] for pod in pods if component(pod) == "gateway")
    server = ("--command", "--", "python", "-m", "http.server", str(OUTSIDE), "--directory", "/tmp")
    run = ("run", STRANGER, "-n", namespace, "--restart=Never", f"--image={image}", "--image-pull-policy=IfNotPresent")
    made.kubectl(*run, *server)
    try:
        made.kubectl("wait", "-n", namespace, "--for=condition=Ready", f"pod/{STRANGER}", "--timeout=300s", timeout=320)
        yield made.kubectl("get", "pod", STRANGER, "-n", namespace, "-o", "jsonpath={.status.podIP}")
    finally:
        made.kubectl("delete", "pod", STRANGER, "-n", namespace, "--grace-period=0", "--force", check=False)


def _differences(made: Cluster, namespace: str, source: str, expected: dict[Port, bool]) -> list[str]:
    probe = ("exec", "-n", namespace, source, "--", "python", "-c", PROBE, *(port.address for port in expected))
    # On a busy node an exec may end without its output.
    opened = json.loads(wait_for(f"the answer of {source}", 300, lambda: made.kubectl(*probe)))
    return [
        f"{source} {'cannot' if should else 'can'} reach {port.name} of {port.component} ({port.address})"
        for port, should in expected.items()
        if (port.address in opened) != should
    ]
