"""Starts one trainer: in this process for one rank, as child processes for more."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from trainer.config.file import load_config
from trainer.config.trainer_config import TrainerConfig, config_text
from trainer.distributed.stop import GRACE_SECONDS, stop_on_signals
from trainer.run.stop_condition import FOREVER, StopCondition

POLL_SECONDS = 0.05


def main(
    settings: Settings,
    config: TrainerConfig,
    ranks: int,
    metrics_port: int | None = None,
    stop_condition: StopCondition = FOREVER,
) -> int:
    """Runs the trainer until it ends; returns the exit code. Raises NoBroker, PortTaken."""
    settings.require_bootstrap()
    if ranks == 1:
        # The imports take seconds; signals must be handled before.
        with stop_on_signals() as stop:
            from trainer.run.loop import run

            return run(config, settings, stop, metrics_port, stop_condition)
    # The ranks read the resolved configuration, so later edits of the file or of variables cannot reach them.
    resolved = settings.home / "resolved" / f"{config.run_id}.yaml"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(config_text(config), encoding="utf-8")
    arguments = ["train", "--config", str(resolved), *stop_condition.arguments()]
    if metrics_port is not None:
        arguments += ["--metrics-port", str(metrics_port)]
    return spawn(arguments, ranks, settings)


def launch(
    config_path: Path, ranks: int, metrics_port: int | None = None, stop_condition: StopCondition = FOREVER
) -> int:
    """Runs `main` with a configuration file, and settings and variables of the environment. Raises ConfigError."""
    return main(Settings.from_env(), load_config(config_path, os.environ), ranks, metrics_port, stop_condition)


def spawn(arguments: Sequence[str], ranks: int, settings: Settings, exit_code: int = ExitCode.STOPPED) -> int:
    """Runs `python -m trainer ARGUMENTS` as `ranks` connected processes; returns 0 if all return 0.

    When one ends with an error, or this process is asked to stop (and then ends with `exit_code`), all end.
    """
    from torch._C._distributed_c10d import TCPStore

    # The store lives in the launcher, so it survives the death of a rank; port 0 avoids a race for a port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        variables.BOOTSTRAP.name: settings.require_bootstrap(),
        variables.HOME.name: str(settings.home),
        variables.ACCEPT_LOSS.name: "true" if settings.accept_loss else "",
        variables.CACHE.name: str(settings.cache),
        variables.STORE.name: settings.store or "",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
    }
    command = [sys.executable, "-m", "trainer", *arguments]
    # Longer than the ranks' own grace period, within which they end by themselves.
    with stop_on_signals(exit_code, GRACE_SECONDS + 0.7) as stop:
        children = [
            subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            while not stop.requested:
                codes = [child.poll() for child in children]
                failed = [code for code in codes if code]
                if failed:
                    return max(ExitCode.ERROR, *failed)
                if all(code == 0 for code in codes):
                    return ExitCode.OK
                time.sleep(POLL_SECONDS)
            return ExitCode.OK
        finally:
            _end_children(children)


def _end_children(children: Sequence["subprocess.Popen[bytes]"]) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS + 0.4
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
