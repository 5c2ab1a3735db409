"""Conditions of alerts that no other fault makes. Their runbooks have the way back."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil

from schemas.records import Source, Terms
from tentalis.local.ports import free_port
from tests.drill.bench import Bench
from tests.drill.fault import Sight, fault
from tests.drill.stack import Stack
from tests.support.kafka_fixture import eventually

BOUND = 20
OPEN_FILES = 256
METRICS = "curl -s http://127.0.0.1:$GATEWAY_PORT/metrics"
LOST = 'tentalis_gateway_recorded_total{became="lost"}'
SHARE = (
    "awk '/^process_open_fds/ {n = $2} /^process_max_fds/ {m = $2} "
    """END {print (n > 0.8 * m ? "above" : "below"), "80 %"}'"""
)
CALL = (
    "curl -s -w 'status %{http_code}' http://127.0.0.1:$GATEWAY_PORT/v1/chat/completions "
    "-H 'Content-Type: application/json' -H 'X-Session-Id: lost' "
    """-d '{"model": "assistant", "max_tokens": 8, "messages": [{"role": "user", "content": "Why do cats purr?"}]}'"""
)


def runbook(alert: str) -> str:
    return f"runbooks/tentalis-{alert}.md"


@fault("bench", runbook("partitions-wait"), code=0, says=f"the bound is {BOUND} tasks")
def partitions_that_wait(bench: Bench) -> Iterator[Sight]:
    """A join with more open tasks than its bound reads nothing more."""
    asked = bench.work.ask("partitions-that-wait", 3 * BOUND)
    port = free_port()
    bench.start("join", "--max-open-tasks", str(BOUND), "--metrics-port", str(port))
    eventually(lambda: "all partitions are paused" in bench.log("join"), 90, 0.2, lambda: bench.log("join")[-3000:])
    bench.shell.env |= {"METRICS_PORT": str(port), "PID": str(bench.processes.pop("join").pid)}
    yield bench.shell.run(f"curl -s http://127.0.0.1:{port}/readyz")
    bench.work.answer(asked)
    with bench.running("join"):
        bench.work.settled("partitions-that-wait")


@fault("bench", runbook("join-timeouts"), code=0, says="expired")
def tasks_without_results(bench: Bench) -> Iterator[Sight]:
    """Tasks whose deadline passes before a result comes: no worker runs."""
    run = "tasks-without-results"
    bench.work.ask(run, 4, terms=Terms(rl=Source.RESULT, deadline_ms=1000))
    bench.shell.env["RUN"] = run
    with bench.running("join"):
        bench.work.settled(run)
        yield bench.shell.run(f"tentalis verify {run}")
        bench.work.answer(bench.work.ask(f"{run}-after", 4))
        bench.work.settled(f"{run}-after")


@fault("stack", runbook("model-server-down"), code=0, says="model stopped")
def a_stopped_model_server(stack: Stack) -> Iterator[Sight]:
    assert stack.shell.run("tentalis stop model").code == 0
    ports = stack._ports()
    stack.shell.env["METRICS_PORT"] = str(ports["policies"])
    eventually(lambda: stack.shell.run(f"curl -sf http://127.0.0.1:{ports['policies']}/readyz").code, 60, 1.0)
    yield stack.shell.run("tentalis status")
    stack.works("stopped-model-server")


@fault("stack", runbook("trainer-stuck"), state="unresponsive", says="stopped by a signal (SIGSTOP)")
def a_frozen_trainer(stack: Stack) -> Iterator[Sight]:
    os.kill(stack.pid("trainer"), signal.SIGSTOP)
    yield stack.sight("trainer", "unresponsive")
    stack.works("frozen-trainer")


@fault("stack", runbook("gateway-loses-turns"), code=0, says=LOST)
def turns_that_are_lost(stack: Stack) -> Iterator[Sight]:
    """The broker does not answer and the disk is full, so that a turn can be kept nowhere."""
    stack.ready()
    stack.shell.env["PID"] = str(stack.pid("broker"))
    os.kill(stack.pid("broker"), signal.SIGSTOP)

    def refused() -> bool:
        with suppress(OSError):  # another process has taken what was free
            stack.fill(0)
        return "status 503" in stack.shell.run(CALL).says

    eventually(refused, 60, 0.2, lambda: stack.shell.run(METRICS).says[-3000:])
    yield stack.shell.run(f"{METRICS} | grep '^tentalis_gateway_recorded_total' | grep -v ' 0.0$'")
    stack.works("lost-turns")


@fault("stack", runbook("open-files"), code=0, says="above 80 %")
def many_open_calls(stack: Stack) -> Iterator[Sight]:
    """Clients that send their requests slowly, at a gateway that may open few files."""
    stack.ready()
    gateway = psutil.Process(stack.pid("gateway"))
    stack.shell.env["PID"] = str(gateway.pid)
    gateway.rlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, gateway.rlimit(resource.RLIMIT_NOFILE)[1]))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 100\r\n\r\n"
    with ExitStack() as calls:
        while gateway.num_fds() < 0.85 * OPEN_FILES:
            for _ in range(8):
                call = calls.enter_context(socket.create_connection(("127.0.0.1", stack.gateway_port)))
                call.sendall(head)
        yield stack.shell.run(f"{METRICS} | {SHARE}")
    stack.works("many-open-calls")
