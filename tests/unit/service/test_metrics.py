"""The exporter of a process, and its answers on its port."""

import os
import urllib.error
import urllib.request

import pytest

from tentalis.agents.workers import metrics
from tentalis.service.health import Health, served
from tentalis.service.metrics import Exporter
from tentalis.service.ports import PortTaken, listening_sockets
from tests.support.http_get import answer_of


def test_a_metric_of_another_kind_or_twice_is_refused() -> None:
    exporter = Exporter("worker")
    with pytest.raises(ValueError, match="is a counter, not a gauge"):
        exporter.gauge(metrics.WORKER_TASKS)
    exporter.counter(metrics.WORKER_TASKS)
    with pytest.raises(ValueError, match="tentalis_worker_tasks_total is exported twice by worker"):
        exporter.read(metrics.WORKER_TASKS, lambda: 0)


def test_health_says_what_is_wrong() -> None:
    problems: dict[str, str | None] = {"ready": "no partitions", "stuck": None}
    exporter = Exporter("worker")
    health = Health(exporter, lambda: problems["ready"], lambda: problems["stuck"])
    with served(health, 0) as port:
        assert port
        assert answer_of(port, "/healthz") == (200, "ok\n")
        assert answer_of(port, "/readyz") == (503, "not ready: no partitions\n")
        assert "\ntentalis_ready 0.0\n" in answer_of(port, "/metrics")[1]
        problems |= {"ready": None, "stuck": "it hangs"}
        assert answer_of(port, "/readyz?verbose") == (200, "ready\n")
        assert answer_of(port, "/healthz") == (503, "not ok: it hangs\n")
        assert "\ntentalis_ready 1.0\n" in answer_of(port, "/metrics")[1]
        assert answer_of(port, "/")[0] == 404
        with (
            pytest.raises(
                PortTaken,
                match=rf"worker cannot listen on 127.0.0.1:{port}: .* by process {os.getpid()} .*--metrics-port",
            ),
            served(Health(Exporter("worker"), lambda: None), port),
        ):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5)


def test_without_a_port_nothing_listens() -> None:
    with served(Health(Exporter("worker"), lambda: None), None) as port:
        assert port is None


def test_a_taken_port_names_who_holds_it() -> None:
    (holder,) = listening_sockets("127.0.0.1", 0, "model server")
    with holder:
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            PortTaken, match=f"gateway cannot listen on 127.0.0.1:{port}: the port is taken by process"
        ) as caught:
            listening_sockets("127.0.0.1", port, "gateway")
        assert f"process {os.getpid()} (" in str(caught.value) and "--port" in str(caught.value)
    with pytest.raises(PortTaken, match=r"cannot listen on 192\.0\.2\.1:8000: Cannot assign requested address"):
        listening_sockets("192.0.2.1", 8000, "gateway")
    with pytest.raises(PortTaken, match=r"cannot listen on no\.such\.host\.invalid"):
        listening_sockets("no.such.host.invalid", 8000, "gateway")
    for server in listening_sockets("127.0.0.1", port, "gateway"):
        server.close()
