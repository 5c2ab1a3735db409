"""One trainer of any number of ranks: here for one, as child processes for more."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tentalis.config import Settings
from tentalis.service import STOPPED
from trainer.config import TrainerConfig, config_text
from trainer.config_file import load_config
from trainer.goal import FOREVER, Goal
from trainer.stop import GRACE_SECONDS, stop_on_signals

POLL_SECONDS = 0.05


def main(
    settings: Settings, config: TrainerConfig, ranks: int, metrics_port: int | None = None, goal: Goal = FOREVER
) -> int:
    """Runs the trainer until it ends; returns the exit code. Raises NoBroker, PortTaken."""
    settings.require_bootstrap()
    if ranks == 1:
        # The imports take seconds: a signal must be heard before.
        with stop_on_signals() as stop:
            from trainer.loop import run

            return run(config, settings, stop, metrics_port, goal)
    # What the ranks read is settled: no rank looks at variables or at a file that somebody edits meanwhile.
    resolved = settings.home / "resolved" / f"{config.run_id}.yaml"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(config_text(config), encoding="utf-8")
    arguments = ["train", "--config", str(resolved), *goal.arguments()]
    if metrics_port is not None:
        arguments += ["--metrics-port", str(metrics_port)]
    return spawn(arguments, ranks, settings)


def launch(config_path: Path, ranks: int, metrics_port: int | None = None, goal: Goal = FOREVER) -> int:
    """`main` with a configuration file, and settings and variables of the environment. Raises ConfigError."""
    return main(Settings.from_env(), load_config(config_path, os.environ), ranks, metrics_port, goal)


def spawn(arguments: Sequence[str], ranks: int, settings: Settings, exit_code: int = STOPPED) -> int:
    """Runs `python -m trainer ARGUMENTS` as `ranks` processes that know one another; returns 0 if all return 0.

    When one ends with an error, or this process is asked to stop (and then ends with `exit_code`), all end.
    """
    from torch._C._distributed_c10d import TCPStore

    # The store lives here, so no rank's death takes it away from the others, and with port 0 nobody races for a port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = os.environ | {
        "TENTALIS_BOOTSTRAP": settings.require_bootstrap(),
        "TENTALIS_HOME": str(settings.home),
        "TENTALIS_CACHE": str(settings.cache),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
    }
    command = [sys.executable, "-m", "trainer", *arguments]
    # The ranks end by themselves within their grace.
    with stop_on_signals(exit_code, GRACE_SECONDS + 0.7) as stop:
        children = [
            subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        try:
            while not stop.asked:
                codes = [child.poll() for child in children]
                failed = [code for code in codes if code]
                if failed:
                    return max(1, *failed)
                if all(code == 0 for code in codes):
                    return 0
                time.sleep(POLL_SECONDS)
            return 0
        finally:
            _end(children)


def _end(children: Sequence["subprocess.Popen[bytes]"]) -> None:
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
