"""Starts one trainer, or its part on this node: in this process for one rank, as child processes for more."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tentalis.kafka.preflight import connect_as
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.health import Health, served
from tentalis.service.imports import without_collections
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings
from tentalis.service.variable import BadVariable
from tentalis.service.version import app_version
from trainer.config.file import load_config
from trainer.config.trainer_config import TrainerConfig, config_text
from trainer.distributed.members import AlreadyDone, MemberLost
from trainer.distributed.nodes import NodeMeeting, NodePlace, meet_nodes
from trainer.distributed.rank_place import STORE_IS_SERVED, rank_place
from trainer.distributed.stop import GRACE_SECONDS, StopRequest, stop_on_signals
from trainer.distributed.store import LOOPBACK
from trainer.run.stop_condition import FOREVER, StopCondition

POLL_SECONDS = 0.05


def main(
    settings: Settings,
    config: TrainerConfig,
    ranks: int,
    metrics_port: int | None = None,
    stop_condition: StopCondition = FOREVER,
    place: NodePlace | None = None,
) -> int:
    """Runs the trainer until it ends; returns the exit code. `place`: of this machine among several nodes, each of
    which runs `ranks` processes. If the variables of `rank_place` make this process one of several ranks, it runs that
    rank. Raises NoBroker, PortTaken, BadVariable, RankLost."""
    if rank_place().given and (ranks > 1 or place is not None):
        raise BadVariable(
            "RANK and WORLD_SIZE are set, so this process is one rank and cannot start ranks: unset them, or omit "
            "--ranks and --nodes"
        )
    settings.require_bootstrap()
    if ranks == 1 and place is None:
        # The imports take seconds; signals must be handled before.
        with stop_on_signals() as stop:
            with without_collections():
                from trainer.run.loop import run

            return run(config, settings, stop, metrics_port, stop_condition)
    # The ranks read the resolved configuration, so later edits of the file or of variables cannot reach them.
    # Nodes may share a folder, and each writes when it starts.
    node = "" if place is None else f".{place.index}"
    resolved = settings.home / "resolved" / f"{config.run_id}{node}.yaml"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(config_text(config), encoding="utf-8")
    arguments = ["train", "--config", str(resolved), *stop_condition.arguments()]
    if metrics_port is not None:
        arguments += ["--metrics-port", str(metrics_port)]
    if place is None:
        return spawn(arguments, ranks, settings)
    # Rank 0, on node 0, serves for itself. A node that waits is ready, so that an update of the nodes reaches node 0.
    health = Health(Exporter("trainer"), lambda: None)
    with served(health, metrics_port if place.index else None):
        text = f"{app_version()}\n{config_text(config)}"
        return spawn(arguments, ranks, settings, place=place, settings_text=text)


def launch(
    config_path: Path, ranks: int, metrics_port: int | None = None, stop_condition: StopCondition = FOREVER
) -> int:
    """Runs `main` with a configuration file, and settings and variables of the environment. Raises ConfigError, and
    the errors of `training_settings`."""
    config = load_config(config_path, os.environ)
    with stop_on_signals(then="nothing was begun"):
        settings = training_settings()
    return main(settings, config, ranks, metrics_port, stop_condition)


def training_settings() -> Settings:
    """Returns the settings of the environment, once a broker has confirmed that a trainer may use its topics. Raises
    NoBroker, BadVariable, Unreachable, Forbidden, NoSuchTopic, TopicLost."""
    settings = Settings.from_env()
    connect_as(settings, "trainer")
    return settings


def spawn(
    arguments: Sequence[str],
    ranks: int,
    settings: Settings,
    *,
    place: NodePlace | None = None,
    settings_text: str = "",
) -> int:
    """Runs `python -m trainer ARGUMENTS` as `ranks` connected processes; returns 0 if all return 0.

    When one ends with an error, or this process is asked to stop (and then ends with STOPPED), all end; with
    several nodes, those of all nodes. `place`, `settings_text`: see `meet_nodes`.
    """
    # Longer than the ranks' own grace period, within which they end by themselves.
    with stop_on_signals(grace=GRACE_SECONDS + 0.7) as stop:
        if place is None:
            from torch._C._distributed_c10d import TCPStore

            # The store lives in the launcher, so it survives the death of a rank; port 0 avoids a race for a port.
            store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            return _run_ranks(arguments, ranks, settings, stop, NodePlace(0, 1, LOOPBACK, store.port), None)
        try:
            meeting = meet_nodes(place, f"{ranks} ranks\n{settings_text}", stop.check)
        except AlreadyDone as done:
            print(done, file=sys.stderr)
            return ExitCode.OK
        return _run_ranks(arguments, ranks, settings, stop, place, meeting)


def _run_ranks(
    arguments: Sequence[str],
    ranks: int,
    settings: Settings,
    stop: StopRequest,
    place: NodePlace,
    meeting: NodeMeeting | None,
) -> int:
    environment = os.environ | {
        variables.BOOTSTRAP.name: settings.require_bootstrap(),
        variables.HOME.name: str(settings.home),
        variables.ACCEPT_LOSS.name: "true" if settings.accept_loss else "",
        variables.CACHE.name: str(settings.cache),
        variables.STORE.name: settings.store or "",
        "WORLD_SIZE": str(ranks * place.count),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": place.store_host,
        "MASTER_PORT": str(place.port),
        STORE_IS_SERVED: "True",
    }
    if meeting is None:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    command = [sys.executable, "-m", "trainer", "--launcher", str(os.getpid()), *arguments]
    first = place.index * ranks
    children = [
        subprocess.Popen(command, env=environment | {"RANK": str(first + local), "LOCAL_RANK": str(local)})
        for local in range(ranks)
    ]
    code: int = ExitCode.STOPPED
    try:
        code = _wait_for_ranks(children, stop, meeting)
        if meeting is not None and code == ExitCode.OK and not stop.requested:
            meeting.finish()
    except MemberLost as error:
        print(f"error: {error}: the ranks of this node end too", file=sys.stderr)
        code = ExitCode.ERROR
    finally:
        deadline = _ask_to_end(children)
        if meeting is not None and (code != ExitCode.OK or stop.requested):
            meeting.leave(ExitCode.STOPPED if stop.requested else code)
        _wait_for_end(children, deadline)
    return code


def _wait_for_ranks(
    children: "Sequence[subprocess.Popen[bytes]]", stop: StopRequest, meeting: NodeMeeting | None
) -> int:
    """Returns the exit code of the ranks when all have ended, one failed, or a stop is requested. Raises MemberLost."""
    while not stop.requested:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed:
            return max(ExitCode.ERROR, *failed)
        if all(code == 0 for code in codes):
            return ExitCode.OK
        if meeting is not None:
            meeting.check()
        time.sleep(POLL_SECONDS)
    return ExitCode.OK


def _ask_to_end(children: Sequence["subprocess.Popen[bytes]"]) -> float:
    """Asks the ranks to end; returns the time until which they may take."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    return time.monotonic() + GRACE_SECONDS + 0.4


def _wait_for_end(children: Sequence["subprocess.Popen[bytes]"], deadline: float) -> None:
    """Waits until the ranks have ended; kills those that have not at the deadline."""
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
