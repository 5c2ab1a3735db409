"""The processes of the local stack: their commands, health checks and dependencies."""

from __future__ import annotations

import functools
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tentalis.inference.vllm.command import server_dtype
from tentalis.kafka import topology
from tentalis.kafka.topology import Application, InStack
from tentalis.local.ports import LOOPBACK
from tentalis.local.spec import NotReady, ProcessSpec
from tentalis.local.state import StateDir
from tentalis.service import variables
from tentalis.service.settings import Settings

GATEWAY = "gateway"
SERVER_ID = "local"
# vLLM loads a large model and may compile it before it is ready.
_VLLM_START_S = 1800.0
# Seconds for an answer of a health endpoint: on a busy machine, a thread may wait long for its turn.
_ANSWER_S = 5.0
_REASON_BYTES = 2000


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Options of the stack.

    Attributes:
        state: state directory, held by the caller.
        settings: if `bootstrap` is set, the stack uses that Kafka and starts no broker.
        model: folder of the base model.
        trainer_config: configuration of the run to train.
        environment: kind of tasks that the worker answers.
        environment_file: file of environments, for all processes; None: that of TENTALIS_ENVIRONMENT_FILE, if set.
        worker: further arguments of `tentalis worker`.
        manager: arguments of `tentalis manager`; empty for a stack without a scenario.
        ranks: number of training processes.
        threads: CPU threads of the model server.
        gateway: the policy that a gateway answers with; None for no gateway.
        scale: number of processes of an application, where it is not one.
        server_id: id of the model server in the acknowledgements of adapters: unique on one Kafka.
        vllm: further arguments of `tentalis serve vllm`, if vLLM is the model server; None: `tentalis serve model`.
        whole_models: most fully trained versions that the local model server holds.
        joins: the stack shares the work of another one on the same Kafka, which trains and promotes.
        scorers: file of scorers of the scoring application.
        hinters: file of hinters of the hinting application.
        without: names of applications that it does not start.
    """

    state: StateDir
    settings: Settings
    model: Path
    trainer_config: Path
    environment: str = "chat"
    environment_file: Path | None = None
    worker: tuple[str, ...] = ()
    manager: tuple[str, ...] = ()
    ranks: int = 1
    threads: int = os.cpu_count() or 1
    gateway: str | None = None
    scale: Mapping[str, int] = field(default_factory=dict)
    server_id: str = SERVER_ID
    vllm: tuple[str, ...] | None = None
    whole_models: int = 8
    joins: bool = False
    scorers: Path | None = None
    hinters: Path | None = None
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Stack:
    """The process specs, and the addresses of their services."""

    specs: list[ProcessSpec]
    settings: Settings
    server: str
    gateway: str | None = None


def build_stack(options: StackOptions) -> Stack:
    """Chooses ports and builds the process specs. Secrets reach processes by the environment, never by argv.

    Raises StateDirError if another process has taken the broker's port, BadSecurity if the settings ask for security
    that the local broker does not offer.
    """
    settings, ports = options.settings, None
    if settings.bootstrap is None:
        settings.require_plaintext()
        ports = [str(options.state.port(name, fixed=True)) for name in ("broker", "controller")]
        settings = settings.model_copy(update={"bootstrap": f"{LOOPBACK}:{ports[0]}"})
    builder = _Builder(options, settings)
    specs = [] if ports is None else [builder.broker(*ports)]
    specs.append(builder.topics(() if ports is None else ("broker",)))
    started = applications_started(
        gateway=options.gateway is not None, scenario=bool(options.manager), joins=options.joins
    )
    for each in started:
        if each.name in options.without:
            continue
        specs += [builder.application(each, number) for number in range(1, options.scale.get(each.name, 1) + 1)]
    return Stack(specs, settings, builder.server, None if options.gateway is None else builder.url(GATEWAY))


def applications_started(*, gateway: bool, scenario: bool = False, joins: bool = False) -> list[Application]:
    """Returns the applications of a stack, in the order of their start."""
    kinds = {InStack.ALWAYS} | ({InStack.WITH_GATEWAY} if gateway else set())
    kinds |= {InStack.WITH_SCENARIO} if scenario else set()
    # A policy has one trainer.
    return [each for each in topology.APPLICATIONS if each.in_stack in kinds and not (joins and each.name == "trainer")]


def _environment(settings: Settings, server: str) -> dict[str, str]:
    return {
        variables.BOOTSTRAP.name: settings.require_bootstrap(),
        variables.HOME.name: str(settings.home),
        variables.CACHE.name: str(settings.cache),
        variables.SERVER.name: server,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Threads that spin while waiting would take the cores from the other processes of the stack.
        "OMP_WAIT_POLICY": "passive",
    } | ({variables.DATA.name: str(settings.data)} if settings.data else {})


class _Builder:
    """Builds the specs of one stack."""

    def __init__(self, options: StackOptions, settings: Settings) -> None:
        self._options, self._settings = options, settings
        self._ports: dict[str, int] = {}
        self.server = self.url("model")
        self._env = _environment(settings, self.server)
        if options.environment_file is not None:
            self._env[variables.ENVIRONMENT_FILE.name] = str(options.environment_file)
        if options.gateway is not None:
            self._env[variables.URL.name] = self.url(GATEWAY)

    def _port(self, name: str) -> int:
        if name not in self._ports:  # asked twice, the state directory could choose another one
            # Clients write the gateway's address down; nothing outside the stack needs those of the others.
            preferred = topology.named(GATEWAY).port if name == GATEWAY else None
            self._ports[name] = self._options.state.port(name, preferred=preferred)
        return self._ports[name]

    def url(self, name: str) -> str:
        """The address of a process's HTTP server."""
        return f"http://{LOOPBACK}:{self._port(name)}"

    def broker(self, port: str, controller_port: str) -> ProcessSpec:
        """The local broker."""
        data = self._options.state.folder("kafka")
        command = [sys.executable, "-m", "tentalis.local.broker", "--data-dir", str(data)]
        command += ["--port", port, "--controller-port", controller_port]
        ready = functools.partial(_metadata_ready, self._settings.require_bootstrap())
        level = functools.partial(_set_broker_level, data)
        return ProcessSpec("broker", command, self._env, ready=ready, essential=True, log_level=True, set_level=level)

    def topics(self, after: tuple[str, ...]) -> ProcessSpec:
        """Creates the topics and ends."""
        command = _cli("topics", "apply", "--yes", "--of-stack")
        return ProcessSpec("topics", command, self._env, after=after, expect_exit=True, essential=True)

    def application(self, application: Application, number: int = 1) -> ProcessSpec:
        """An application of the topology: its heartbeat or its port shows that it lives, /readyz that it works.

        `number`: of its processes. Each keeps its name and port over restarts, and with them its id in the consumer
        group, which is made of host name and port.
        """
        name = instance_name(application.name, number)
        port = self._port(name)
        listen = ("--metrics-port" if application.port is None else "--port", str(port))
        beats = application.hang_after is not None
        vllm = application.name == "model" and self._options.vllm is not None
        # readyz needs a broker; healthz needs no other process. A worker that hangs exits by itself.
        paths = ("health", "health") if vllm else ("readyz", "healthz")
        ready, alive = (functools.partial(_answers, f"{self.url(name)}/{path}") for path in paths)
        return ProcessSpec(
            name,
            _cli(*(("serve", "vllm") if vllm else application.command), *self._arguments(application, number), *listen),
            self._env,
            ready=ready,
            alive=None if beats else alive,
            heartbeat=beats,
            hang_after=application.hang_after or ProcessSpec.hang_after,
            after=application.after,
            expect_exit=application.ends,
            ready_timeout=_VLLM_START_S if vllm else ProcessSpec.ready_timeout,
            port=port,
            log_level=True,
        )

    def _arguments(self, application: Application, number: int) -> tuple[str, ...]:
        """The arguments of an application in this stack, the port aside."""
        options = self._options
        if application.stream:
            arguments: tuple[str, ...] = ()
            if application.name == "scoring" and options.scorers is not None:
                arguments = ("--scorers", str(options.scorers))
            if application.name == "hinting" and options.hinters is not None:
                arguments = ("--hinters", str(options.hinters))
            if number > 1:  # processes do not share a folder
                base = variables.STATE_DIR.read() or self._settings.home / "streams"
                arguments += ("--state-dir", f"{base}-{number}")
            return arguments
        match application.name:
            case "model":
                model = ("--policy-model", str(options.model), "--threads", str(options.threads))
                return *model, *(("--max-models", str(options.whole_models)) if options.vllm is None else options.vllm)
            case "policies":
                promotion = ("--promotion", "none" if options.joins else "run")
                # vLLM does not declare its precision.
                return (
                    "--server-id",
                    options.server_id,
                    *promotion,
                    *(("--dtype", server_dtype()) if options.vllm is not None else ()),
                )
            case "worker":
                # Of a stack that joins another one on its host, the id of the server is unique, the host's name is not.
                place = options.server_id if options.joins else socket.gethostname()
                worker_id = instance_name(f"{place}-{options.environment}", number)
                answers_as = ("--environment", options.environment, "--server-id", options.server_id, *options.worker)
                return *answers_as, *(("--worker-id", worker_id) if options.joins or number > 1 else ())
            case "gateway":
                identity = ("--server-id", options.server_id, "--gateway-id", options.server_id)
                # Draining is short: stopping the stack waits for it.
                more = ("--logprobs-mode", "processed", "--wait-for-versions", "--drain-s", "2")
                return "--policy", str(options.gateway), *identity, *more
            case "trainer":
                return "--config", str(options.trainer_config), "--ranks", str(options.ranks)
            case "manager":
                return options.manager
        return ()


def instance_name(name: str, number: int) -> str:
    """Returns the name of one of several processes of an application: scoring, scoring-2, scoring-3."""
    return name if number == 1 else f"{name}-{number}"


def _cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tentalis.cli", *arguments]


def _metadata_ready(bootstrap: str) -> bool:
    from tentalis.local.broker import metadata_ready

    return metadata_ready(bootstrap)


def _set_broker_level(data: Path, level: str | None) -> None:
    from tentalis.local.broker import write_log_config

    write_log_config(data, level)


def _answers(url: str) -> bool:
    """Returns True for an answer 200, False for none. Raises NotReady with the text of any other answer."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        said = error.read(_REASON_BYTES).decode(errors="replace").strip()
        raise NotReady(said.removeprefix("not ready: ") or f"answers {error.code}") from error
    except (urllib.error.URLError, OSError):
        return False
