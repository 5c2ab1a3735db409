"""The processes of the local stack: which there are, how they are started, and what each waits for."""

from __future__ import annotations

import functools
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tentalis.config import Settings
from tentalis.local.ports import LOOPBACK
from tentalis.local.spec import ProcessSpec
from tentalis.local.state import StateDir

APPLICATIONS = ("scoring", "hinting", "join", "aggregation")
SERVER_ID = "local"
# The processes with a heart, and how many seconds it may stand still: longer than anything that each does in one go.
# Waiting for a broker that is away takes a minute, a micro-batch of a large model several.
HANG_AFTER = {"policies": 180.0, "worker": 180.0, "manager": 180.0, "trainer": 900.0}


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What the stack is to run.

    Attributes:
        state: held by the caller.
        settings: with `bootstrap` set, that Kafka is used and no broker is started.
        model: folder of the base model.
        trainer_config: the run that the trainer works on.
        environment: kind of tasks that the worker answers.
        manager: arguments of `tentalis manager`; empty for a stack without a scenario.
        ranks: training processes.
        threads: CPU threads of the model server.
        gateway: the policy that a gateway answers with; None for no gateway.
    """

    state: StateDir
    settings: Settings
    model: Path
    trainer_config: Path
    environment: str = "chat"
    manager: tuple[str, ...] = ()
    ranks: int = 1
    threads: int = os.cpu_count() or 1
    gateway: str | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """The specs, and where what they start can be reached."""

    specs: list[ProcessSpec]
    settings: Settings
    server: str
    gateway: str | None = None


def build_stack(options: StackOptions) -> Stack:
    """Chooses ports and lays out the processes. Secrets reach them by the supervisor's environment, never by argv.

    Raises StateError if the broker's port is taken by somebody else, BadSecurity if the settings ask for more than the
    local broker speaks.
    """
    state, settings = options.state, options.settings
    own_broker = settings.bootstrap is None
    if own_broker:
        settings.require_plaintext()
        broker_port, controller_port = state.port("broker", fixed=True), state.port("controller", fixed=True)
        settings = settings.model_copy(update={"bootstrap": f"{LOOPBACK}:{broker_port}"})
    server_port = state.port("model")
    server = f"http://{LOOPBACK}:{server_port}"
    env = {
        "TENTALIS_BOOTSTRAP": settings.require_bootstrap(),
        "TENTALIS_HOME": str(settings.home),
        "TENTALIS_CACHE": str(settings.cache),
        "TENTALIS_SERVER": server,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that spin while they wait for each other take the cores from the other processes of the stack.
        "OMP_WAIT_POLICY": "passive",
    } | ({"TENTALIS_DATA": str(settings.data)} if settings.data else {})
    specs: list[ProcessSpec] = []

    def add(
        name: str,
        *argv: str,
        after: tuple[str, ...],
        ready: Callable[[], bool] | None = None,
        alive: Callable[[], bool] | None = None,
        port: int | None = None,
    ) -> None:
        command = [sys.executable, "-m", "tentalis.cli", *argv]
        specs.append(
            ProcessSpec(
                name,
                command,
                env,
                ready=ready,
                alive=alive,
                heartbeat=name in HANG_AFTER,
                hang_after=HANG_AFTER.get(name, ProcessSpec.hang_after),
                after=after,
                expect_exit=name in ("topics", "manager", "trainer"),
                port=port,
            )
        )

    def add_measured(name: str, *argv: str, after: tuple[str, ...]) -> None:
        """A process whose port is for health and metrics alone. One with a heart tells the supervisor by that."""
        port = state.port(name)
        # Ready takes a broker; alive takes nobody else. A worker that stands still ends by itself.
        ready, alive = (functools.partial(_answers, f"http://{LOOPBACK}:{port}/{at}") for at in ("readyz", "healthz"))
        checks = {} if name in HANG_AFTER else {"ready": ready, "alive": alive}
        add(name, *argv, "--metrics-port", str(port), after=after, port=port, **checks)

    if own_broker:
        command = [sys.executable, "-m", "tentalis.local.broker", "--data-dir", str(state.folder("kafka"))]
        command += ["--port", str(broker_port), "--controller-port", str(controller_port)]
        ready = functools.partial(_metadata_ready, settings.require_bootstrap())
        specs.append(ProcessSpec("broker", command, env, ready=ready))
    add("topics", "topics", "apply", "--yes", after=("broker",) if own_broker else ())
    add(
        "model",
        *("serve", "model", "--policy-model", str(options.model), "--port", str(server_port)),
        *("--threads", str(options.threads)),
        after=(),
        ready=functools.partial(_answers, f"{server}/readyz"),
        port=server_port,
    )
    served = ("--server-id", SERVER_ID, "--promotion", "run")
    add_measured("policies", "serve", "policies", *served, after=("topics", "model"))
    for name in (*APPLICATIONS, *(() if options.gateway is None else ("sessions",))):
        add_measured(name, "serve", name, after=("topics",))
    add_measured("worker", "worker", "--environment", options.environment, after=("topics", "model"))
    gateway = None
    if options.gateway is not None:
        gateway_port = state.port("gateway")
        gateway = f"http://{LOOPBACK}:{gateway_port}"
        add(
            "gateway",
            *("serve", "gateway", "--policy", options.gateway, "--server-id", SERVER_ID),
            *("--port", str(gateway_port), "--gateway-id", "local", "--logprobs-mode", "processed"),
            *("--drain-s", "2"),  # who stops the stack waits for it
            after=("topics", "model"),
            ready=functools.partial(_answers, f"{gateway}/readyz"),
            alive=functools.partial(_answers, f"{gateway}/healthz"),
            port=gateway_port,
        )
    trainer = ("train", "--config", str(options.trainer_config), "--ranks", str(options.ranks))
    add_measured("trainer", *trainer, after=("topics",))
    if options.manager:
        add_measured("manager", "manager", *options.manager, after=("topics",))
    return Stack(specs, settings, server, gateway)


def _metadata_ready(bootstrap: str) -> bool:
    from tentalis.local.broker import metadata_ready

    return metadata_ready(bootstrap)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
