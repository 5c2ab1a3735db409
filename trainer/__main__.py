"""`python -m trainer`: what the launcher starts as a rank."""

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path

from tentalis import logs
from tentalis.config import Settings
from tentalis.service import UNMENDABLE, Unmendable
from trainer.goal import Goal
from trainer.launch import launch
from trainer.stop import stop_on_signals

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs one rank and returns its exit code."""
    if "RANK" in os.environ:
        _die_with_the_launcher()
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train live")
    train.add_argument("--config", type=Path, required=True)
    train.add_argument("--ranks", type=int, default=1)
    train.add_argument("--metrics-port", type=int, help="where rank 0 answers /healthz, /readyz and /metrics")
    train.add_argument("--steps", type=int, help="end after so many steps of this start")
    train.add_argument("--until-caught-up", action="store_true", help="end when no full batch is left on the log")
    again = commands.add_parser("replay-rank", help="one rank of a replay")
    again.add_argument("--spec", type=Path, required=True)
    options = parser.parse_args()
    logs.configure()
    if options.command == "replay-rank":
        from trainer.replay_job import replay_rank

        return replay_rank(options.spec)
    goal = Goal(options.steps, options.until_caught_up)
    if "RANK" in os.environ:
        # The imports take seconds: a signal must be heard before.
        with stop_on_signals() as stop:
            from trainer.config_file import load_config
            from trainer.loop import run

            try:
                return run(load_config(options.config), Settings.from_env(), stop, options.metrics_port, goal)
            except Unmendable as error:
                print(f"error: {error}", file=sys.stderr)
                return UNMENDABLE
    return launch(options.config, options.ranks, options.metrics_port, goal)


def _die_with_the_launcher() -> None:
    """A rank without its launcher has lost its peers. Linux; elsewhere it notices when it next uses the channel."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
