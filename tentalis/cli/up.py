"""`tentalis up`: starts the supervised local stack."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.serve.options import AcceptLoss
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import DryRun
from tentalis.cli.shared.output import Format, OutputFormat, first_line, show
from tentalis.cli.shared.policy_model import PolicyModel, prepared_model
from tentalis.cli.shared.settings import gateway_url, resolve_settings
from tentalis.cli.shared.stack_checks import check_before_start
from tentalis.cli.shared.startup import configure_logging
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.variable import Variable

if TYPE_CHECKING:
    import threading

    from tentalis.kafka.lag import Groups, LagProbe
    from tentalis.kafka.topology import InStack
    from tentalis.local.stack import Stack
    from tentalis.local.supervisor import Supervisor
    from tentalis.service.settings import Settings
    from trainer.config.trainer_config import TrainerConfig

READY_TIMEOUT = 900.0
# max_staleness without a scenario: nothing paces the tasks, so answers of slightly older versions are trained on too.
STANDING_STALENESS = 4
# Seconds before a process that is not ready is reported: longer than the start of the trainer and the first retry of
# a refused adapter.
SETTLE_S = 40.0
# Seconds for which a reading of the lag is good enough for the supervisor's metrics.
LAG_EVERY_S = 15.0
# Variable with the file descriptor on which the detached stack reports READY or a problem; closed without a report, the
# stack has ended.
READY_FD = variables.READY_FD.name
READY = "ready"
# Seconds between two looks at the processes, once there was a first report.
_WATCH_S = 1.0


class ModelServerKind(StrEnum):
    LOCAL = "local"
    VLLM = "vllm"


log = logging.getLogger(__name__)

ModelServer = Annotated[
    ModelServerKind,
    typer.Option("--server", help="Model server: local (`tentalis serve model`) or vllm (`tentalis serve vllm`)."),
]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Number of training processes.")]
Gateway = Annotated[
    bool,
    typer.Option("--gateway", help="Also start a gateway: an OpenAI-compatible endpoint that learns from its use."),
]
Scale = Annotated[
    list[str] | None,
    typer.Option(
        "--scale",
        metavar="NAME=N",
        help="Number of processes of an application, such as scoring=2; repeatable.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        exists=True,
        dir_okay=False,
        help="Trainer configuration, YAML. Default: continue the newest run of TENTALIS_HOME.",
    ),
]
Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help="Share the work of another stack on the same Kafka: more members of its consumer groups, and a "
        "second model server. The other stack trains and promotes.",
    ),
]


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")] = False,
    policy_model: PolicyModel = None,
    server: ModelServer = ModelServerKind.LOCAL,
    config: Config = None,
    ranks: Ranks = 1,
    gateway: Gateway = False,
    accept_loss: AcceptLoss = False,
    scale: Scale = None,
    join: Join = False,
    dry_run: DryRun = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Starts the whole stack on this machine and runs it until Ctrl-C. Earlier work continues from the log.

    --dry-run checks Kafka, packages and disk, and lists the processes, in the format of --output."""
    configure_logging("INFO")
    from tentalis.service.packages import require

    if accept_loss:
        os.environ[variables.ACCEPT_LOSS.name] = "true"  # the processes of the stack inherit it
    counts = scales(scale or [], gateway=gateway)
    settings = resolve_settings(join_stack=False)
    if join and settings.bootstrap is None:
        raise CommandError("--join needs the Kafka of the other stack: name it with TENTALIS_BOOTSTRAP", ExitCode.USAGE)
    require("`tentalis up`", *(["local"] if settings.bootstrap is None else []), "serve", "train")
    check_before_start(settings, join=join, config=config)
    if dry_run:
        vllm = server is ModelServerKind.VLLM
        planned = _planned(settings, counts, ranks, gateway=gateway, join=join, vllm=vllm)
        show(output, ("process", "command"), planned)
    elif detach:
        _detached(settings.home, policy_model, server, config, ranks, gateway, scale or [], join)
    else:
        _attached(settings, policy_model, server, config, ranks, gateway, counts, join)


def _planned(
    settings: Settings, counts: Mapping[str, int], ranks: int, *, gateway: bool, join: bool, vllm: bool
) -> list[dict[str, object]]:
    """Returns the processes of a stack, in the order of their start."""
    from tentalis.local.stack import applications_started, instance_name

    rows: list[dict[str, object]] = []
    if settings.bootstrap is None:
        rows.append({"process": "broker", "command": "an embedded Kafka"})
    rows.append({"process": "topics", "command": "tentalis topics apply --yes"})
    for each in applications_started(gateway=gateway, joins=join):
        started = ("serve", "vllm") if vllm and each.name == "model" else each.command
        command = " ".join(("tentalis", *started, *(("--ranks", str(ranks)) if each.name == "trainer" else ())))
        rows += [
            {"process": instance_name(each.name, number), "command": command}
            for number in range(1, counts.get(each.name, 1) + 1)
        ]
    return rows


def scales(given: Sequence[str], *, gateway: bool) -> dict[str, int]:
    """Returns the number of processes per application. Raises CommandError: it cannot run so often, or not at all."""
    from tentalis.kafka import topology

    found: dict[str, int] = {}
    for each in given:
        name, _, text = each.partition("=")
        if not text.isascii() or not text.isdecimal() or int(text) < 1:
            raise CommandError(f"--scale {each}: expected NAME=N with N of at least 1", ExitCode.USAGE)
        able = [one for one in topology.APPLICATIONS if one.scales and one.in_stack in _kinds(gateway)]
        application = next((one for one in able if one.name == name), None)
        if application is None:
            names = ", ".join(one.name for one in able)
            hint = "; --ranks sets the number of training processes" if name == "trainer" else ""
            raise CommandError(
                f"--scale {each}: there can be only one process of {name}; {names} can scale{hint}", ExitCode.USAGE
            )
        if int(text) > (most := topology.most_processes(application)):
            raise CommandError(
                f"--scale {each}: the topics of {name} have {most} partitions, so more than {most} would be idle",
                ExitCode.USAGE,
            )
        found[name] = int(text)
    return found


def _kinds(gateway: bool) -> tuple[InStack, ...]:
    from tentalis.kafka.topology import InStack

    return (InStack.ALWAYS, *((InStack.WITH_GATEWAY,) if gateway else ()))


def _attached(
    settings: Settings,
    policy_model: str | None,
    server: ModelServerKind,
    config: Path | None,
    ranks: int,
    gateway: bool,
    scale: Mapping[str, int],
    join: bool,
) -> None:
    from tentalis.inference.vllm.command import find_vllm
    from tentalis.kafka.lag import LagProbe
    from tentalis.local.metrics import supervisor_health
    from tentalis.local.shutdown import signals_unwind, stop_signals
    from tentalis.local.stack import SERVER_ID, StackOptions, build_stack
    from tentalis.local.state import StateDir
    from tentalis.local.supervisor import Supervisor
    from tentalis.service.health import served
    from trainer.config.file import load_config

    if server is ModelServerKind.VLLM:
        find_vllm(variables.VLLM.read(), settings.cache)  # before anything starts
    ready_fd = os.environ.pop(READY_FD, None)  # popped: the processes of the stack must not inherit it
    with ExitStack() as held:
        # Until stop_signals() takes over: Ctrl-C and `tentalis down` must also end a download.
        held.enter_context(signals_unwind())
        state = held.enter_context(StateDir(settings.home))
        if config is None:
            model, run, environment = _standing_run(state.folder("runs"), policy_model, settings.cache)
        else:
            model, run, environment = prepared_model(policy_model, settings.cache), config.absolute(), "chat"
        load_config(run, os.environ)  # as the trainer reads it: a variable may contradict the run that continues
        stop = held.enter_context(stop_signals())
        stack = build_stack(
            StackOptions(
                state=state,
                settings=settings,
                model=model,
                trainer_config=run,
                environment=environment,
                ranks=ranks,
                gateway=_policy_of(run) if gateway else None,
                scale=scale,
                server_id=f"{socket.gethostname()}-{state.port('model')}" if join else SERVER_ID,
                vllm=_vllm_arguments(run) if server is ModelServerKind.VLLM else None,
                whole_models=_versions_held(run),
                joins=join,
                scorers=_of_unfinished(run, "scorers.yaml", variables.SCORERS) if config is None else None,
                hinters=_of_unfinished(run, "hinters.yaml", variables.HINTERS) if config is None else None,
            )
        )
        supervisor = Supervisor(state, stack.specs, metrics_port=state.port("supervisor"))
        lag = LagProbe(stack.settings, _groups(environment, run, stack), LAG_EVERY_S, on_request=True)
        local = settings.bootstrap is None
        health = supervisor_health(supervisor.status, lag, state.folder("kafka") / "log" if local else None)
        held.enter_context(served(health, supervisor.metrics_port))
        held.callback(lag.stop)
        supervisor.start()
        try:
            _watch(supervisor, stack, stop, ready_fd, lag)
        finally:
            supervisor.stop()
        for gone, code in ((supervisor.halted(), ExitCode.NEEDS_OPERATOR), (supervisor.failed(), ExitCode.PERMANENT)):
            if gone:
                raise CommandError("\n".join(f"{name}: {why}" for name, why in gone.items()), code)


def _watch(supervisor: Supervisor, stack: Stack, stop: threading.Event, ready_fd: str | None, lag: LagProbe) -> None:
    """Reports each change between ready and trouble until `stop` is set.

    Raises CommandError if the stack cannot start.
    """
    from tentalis.local.made_topics import warning_of

    said: frozenset[str] | None = None
    unready_since = time.monotonic()
    probing = False
    while not stop.wait(0.2 if said is None else _WATCH_S):
        if failure := supervisor.failure():
            raise CommandError(failure, ExitCode.PERMANENT if supervisor.unmendable() else ExitCode.ERROR)
        processes = supervisor.status()
        if not probing and processes["topics"]["state"] == "done":
            if warning := warning_of(stack.settings):
                log.warning("%s", warning)
            lag.start()
            probing = True
        word, troubled = _word(processes), _troubled(processes)
        if word is None or word == READY:
            unready_since = time.monotonic()
        # A process may still become ready: the trainer, for example, rewrites a missing adapter.
        settles = time.monotonic() - unready_since < SETTLE_S and _may_settle(processes)
        if word is None or troubled == said or (troubled and settles):
            continue
        said = troubled
        if ready_fd is not None:  # only the first report goes to the waiting parent; later ones go to the log
            os.write(int(ready_fd), word.encode()[: select.PIPE_BUF])
            os.close(int(ready_fd))
            ready_fd = None
        log.log(
            logging.INFO if word == READY else logging.ERROR,
            "%s. Kafka on %s, model server on %s%s. `tentalis status` shows the processes, Ctrl-C or "
            "`tentalis down` stops them",
            *(word, stack.settings.bootstrap, stack.server),
            f", gateway on {stack.gateway}/v1" if stack.gateway else "",
        )


def _groups(environment: str, run: Path, stack: Stack) -> Groups:
    """Returns the consumer groups of the stack's applications, with their topics."""
    from tentalis.kafka import topology
    from tentalis.kafka.lag import groups_of

    policies = topology.named("policies")
    started = {spec.name for spec in stack.specs}
    return {**groups_of(environment, _policy_of(run), started), str(policies.group): policies.consumes}


def _word(processes: dict[str, dict[str, Any]]) -> str | None:
    """Returns `ready`, or the processes that are in trouble; None while some are still starting.

    A process counts as ready when it has given a sign of life after it had become ready.
    """
    from tentalis.local.states import ProcessState

    troubled = _troubled(processes)
    settled = (ProcessState.DONE, ProcessState.STOPPED)
    unsettled = [
        one
        for name, one in processes.items()
        if name not in troubled
        and one["state"] not in settled
        and not (one["state"] == ProcessState.READY and one["confirmed"])
    ]
    # A process that waits for one in trouble will not settle: the trouble is the news.
    if troubled and all(one["state"] == ProcessState.WAITING for one in unsettled):
        words = (
            f"{name} is {processes[name]['state']}: {first_line(processes[name]['message'])}"
            for name in processes
            if name in troubled
        )
        return f"not ready: {'; '.join(words)}"
    return None if unsettled or troubled else READY


def _troubled(processes: dict[str, dict[str, Any]]) -> frozenset[str]:
    """Returns the names of the processes in trouble."""
    from tentalis.local.states import TROUBLED

    return frozenset(name for name, one in processes.items() if one["state"] in TROUBLED)


def _may_settle(processes: dict[str, dict[str, Any]]) -> bool:
    """True if every process in trouble may still become ready by itself."""
    from tentalis.local.states import ProcessState

    return not any(one["state"] in (ProcessState.FAILED, ProcessState.HALTED) for one in processes.values())


def _policy_of(run: Path) -> str:
    """Returns the policy that a run trains."""
    from trainer.config.file import load_config

    return load_config(run).policy


def _versions_held(run: Path) -> int:
    """Returns the most versions of a run that its server holds."""
    from tentalis.policies.core import versions_held
    from trainer.config.file import load_config

    return versions_held(load_config(run).max_staleness)


def _vllm_arguments(run: Path) -> tuple[str, ...]:
    """Returns the arguments of `tentalis serve vllm` for the adapters of a run. Raises CommandError if it has none."""
    from trainer.config.file import load_config

    lora = load_config(run).lora
    if lora is None:
        raise CommandError(
            f"{run} trains the whole model (lora: null), and vLLM loads adapters only while it serves. Start with "
            "--server local, or train an adapter"
        )
    return "--max-rank", str(lora.rank), "--max-adapters", str(_versions_held(run))


def _standing_run(runs: Path, policy_model: str | None, cache: Path) -> tuple[Path, Path, str]:
    """Returns model folder, trainer configuration and environment for a run without an end.

    Continues the newest run of this state directory, so that its policy is served and trained further. Begins a new run
    if there is none, or if the newest has another model. Both are held near the base model (`anchored`). Raises
    LearnError if the newest run is one of `tentalis learn` whose options cannot be read.
    """
    from tentalis.agents.scenarios import make_scenario
    from tentalis.demo.runs import newest
    from trainer.config.conversation import anchored
    from trainer.config.file import load_config
    from trainer.config.trainer_config import TrainerConfig, given_text

    found = newest(runs)
    last = load_config(found.config) if found is not None else None
    model = prepared_model(policy_model or (last.base_model if last is not None else None), cache)
    if found is not None and last is not None and Path(last.base_model) == model:
        environment = make_scenario(found.scenario).environment if found.scenario else "chat"
        changes = {"steps": None, "max_staleness": max(last.max_staleness, STANDING_STALENESS)}
        config = last.model_copy(update=changes | _standing_promotion(found.folder, last))
        path = found.folder / "standing.yaml"
    else:
        environment, run_id = "chat", time.strftime("run-%Y%m%d-%H%M%S", time.gmtime())
        config = TrainerConfig(run_id=run_id, policy="assistant", base_model=str(model), base_model_name=model.name)
        path = runs / run_id / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(given_text(anchored(config)), encoding="utf-8")
    return model, path, environment


def _standing_promotion(folder: Path, config: TrainerConfig) -> dict[str, Any]:
    """Returns the changes of `promotion` and `guard` for the run of a folder. `tentalis learn` sets `always` because
    its reward function says what a good answer is; no such function judges a conversation. The function may have
    taught answers of a word, which are no collapse: without `min_length` they are compared with the base model's alone.
    Values of --set are kept."""
    from tentalis.cli.shared.set_option import parse_changes
    from tentalis.learning.runs import changes_of

    given = changes_of(folder)
    if given is None or "promotion" in parse_changes(given):
        return {}
    guard = {"min_length": 0.0} | config.guard.model_dump(exclude_unset=True)
    return {"promotion": "guarded", "guard": config.guard.model_validate(guard)}


def _of_unfinished(config: Path, name: str, variable: Variable[Path | None]) -> Path | None:
    """Returns a file of an unfinished run of `tentalis learn`, whose tasks may be in flight, else None. A variable that
    names a file takes precedence."""
    file = config.parent / name
    unfinished = file.exists() and not (config.parent / "finished").exists()
    return file if unfinished and variable.read() is None else None


def _detached(
    home: Path,
    policy_model: str | None,
    server: ModelServerKind,
    config: Path | None,
    ranks: int,
    gateway: bool,
    scale: Sequence[str],
    join: bool,
) -> None:
    from tentalis.local.made_topics import warning_of
    from tentalis.local.state import StateDir

    state = StateDir(home)
    sink_path = home / "logs" / "up.log"
    command = [sys.executable, "-m", "tentalis.cli", "up"]
    command += ["--policy-model", policy_model] if policy_model else []
    command += ["--server", server.value]
    command += ["--config", str(config)] if config else []
    command += ["--ranks", str(ranks)]
    command += ["--gateway"] if gateway else []
    command += [argument for each in scale for argument in ("--scale", each)]
    command += ["--join"] if join else []
    try:
        state.folder("logs")
        sink = sink_path.open("ab")
    except OSError as error:
        raise CommandError(f"cannot use {home}: {error}. Choose another directory with TENTALIS_HOME") from error
    read_end, write_end = os.pipe()
    with sink:
        begin = sink.tell()
        process = subprocess.Popen(
            command,
            env=os.environ | {READY_FD: str(write_end)},
            pass_fds=[write_end],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    os.close(write_end)
    try:
        heard, _, _ = select.select([read_end], [], [], READY_TIMEOUT)
    except KeyboardInterrupt:  # the stack has its own session and does not receive the signal
        process.terminate()
        process.wait()
        raise
    word = os.read(read_end, select.PIPE_BUF).decode(errors="replace") if heard else ""
    os.close(read_end)
    if not heard:
        raise CommandError(
            f"not ready after {READY_TIMEOUT:g} s; the stack keeps running, see `tentalis status` and {sink_path}"
        )
    if not word:
        code = process.wait(30)
        if code in (0, ExitCode.STOPPED):
            raise CommandError("the stack was stopped before everything was ready")
        said = sink_path.read_bytes()[begin:][-2000:].decode(errors="replace")
        raise CommandError(f"the stack ended with exit code {code}; the end of {sink_path}:\n{said}", code)
    if word != READY:
        raise CommandError(f"{word}. The stack runs: `tentalis status` shows the processes, `tentalis down` stops them")
    if warning := warning_of(resolve_settings()):
        typer.echo(f"warning: {warning}", err=True)
    where = f"gateway on {gateway_url(None, home)}/v1. " if gateway else ""
    typer.echo(f"ready: {where}`tentalis status` shows the processes, `tentalis down` stops them", err=True)
