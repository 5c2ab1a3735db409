"""A broker of its own, the processes that somebody leaves, and what of them lies where."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.tensors import int32_bytes
from tentalis.cli.main import app
from tentalis.kafka.admin import ensure
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.trajectories import view_of
from tentalis.service.settings import Settings
from tests.support import forked
from tests.support.fork_server import ForkedProcess
from tests.support.kafka_fixture import eventually, known
from tests.support.trainer_lab import config, tiny_model
from trainer.config.trainer_config import config_text
from trainer.data.fetch import BadRollouts
from trainer.replay.replay import replay

RUN, POLICY = "run-of-two", "tiny"


@dataclass(frozen=True)
class Person:
    """Somebody, by what shows that a record has something of theirs in it."""

    user: str
    word: str
    tokens: tuple[int, ...]

    @property
    def response(self) -> bytes:
        """Their answers' token ids, as a result has them."""
        return int32_bytes(list(self.tokens))

    def shows_in(self, value: bytes | None) -> bool:
        """Returns True if a record holds data of the erased person."""
        traces = (self.user.encode(), self.word.encode(), self.response)
        return any(trace in (value or b"") for trace in traces)


class Stage:
    """A broker, and what the test says to it and to the commands. `processes` end with the test."""

    def __init__(self, broker: EmbeddedBroker, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings(bootstrap=broker.bootstrap, home=folder / "home", cache=folder / "cache")
        eventually(lambda: ensure(self.settings) is not None, 30)
        self.codec = make_codec(self.settings)
        self.publisher = Publisher(self.settings, "test", self.codec)
        self.environment = os.environ | {
            "TENTALIS_BOOTSTRAP": broker.bootstrap,
            "TENTALIS_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        """A process that logs as `name`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen([sys.executable, "-m", *command], env=self.environment, stdout=log, stderr=log)
        self.processes[name] = started
        return started

    def serve(self, name: str, *options: str) -> None:
        """`tentalis serve NAME`."""
        command = ["-m", "tentalis.cli", "serve", name, "--instance", "0", *options]
        self.processes[name] = ForkedProcess(command, self.environment, self.folder / f"{name}.log")

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def said(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{name}: {(self.folder / f'{name}.log').read_text()[-2000:]}" for name in self.processes)

    def wait(self, check: Callable[[], Any], timeout: float = 300.0) -> Any:
        """Until `check` returns something true. A process that ended on its own account is an error."""

        def checked() -> Any:
            ended = {name: code for name, each in self.processes.items() if (code := each.poll())}
            if ended:
                raise RuntimeError(f"ended: {ended}\n{self.said()}")
            return known(check)

        return eventually(checked, timeout, 0.2, self.said)

    def train(self, **more: Any) -> None:
        """Trains the run to its end."""
        of = config(
            tiny_model(self.folder / "model"),
            run_id=RUN,
            policy=POLICY,
            start=dict.fromkeys(range(topics.table().keyed_partitions), 0),
            **more,
        )
        path, log = self.folder / "trainer.yaml", self.folder / "trainer.log"
        path.write_text(config_text(of))
        trainer = forked.start(forked.train, str(path), self.environment, log, log)
        try:
            trainer.join(600)
            assert trainer.exitcode == 0, log.read_text()
        finally:
            forked.end(trainer)

    def command(self, *arguments: str) -> tuple[int, Any]:
        """A command with JSON on stdout; exit code and the JSON."""
        env = {"TENTALIS_HOME": self.environment["TENTALIS_HOME"]}
        bootstrap = str(self.settings.bootstrap)
        done = CliRunner().invoke(app, [*arguments, "--bootstrap-server", bootstrap, "-o", "json"], env=env)
        assert done.stdout, done.stderr
        return done.exit_code, json.loads(done.stdout)

    def forget(self, *whom: str, husks: int) -> None:
        """`tentalis forget`, which is complete; and once more, which finds nothing more to do."""
        for expected in (husks, 0):
            code, report = self.command("forget", *whom, "--yes")
            assert (code, report["complete"], report["husks"], report["waiting"]) == (0, True, expected, {}), report

    def replayed(self, *options: str, timeout: float = 600) -> tuple[int, Any]:
        """A replay, which sets torch up for its whole process and so has one of its own."""
        out, err = self.folder / "replay.json", self.folder / "replay.log"
        out.unlink(missing_ok=True)  # of an earlier replay
        wanted = json.dumps([["replay", RUN, *options, "-o", "json"]])
        process = forked.start(forked.commands, wanted, self.environment, out, err)
        try:
            process.join(timeout)
            code, report, said = json.loads(out.read_text())
        finally:
            forked.end(process)
        assert report, said
        return code, json.loads(report)

    def newest(self, topic: str) -> dict[str | None, Stored]:
        return {stored.key: stored for stored in read_to_end(self.settings, topic)}

    def traces(self, topic: str, person: Person) -> set[str | None]:
        """Keys whose newest value has anything of somebody in it; requests to forget left out, which name whom."""
        found = {key for key, stored in self.newest(topic).items() if person.shows_in(stored.value)}
        return {key for key in found if not str(key).startswith("forget/")}

    def viewed(self) -> set[str]:
        """The rollouts in the Parquet files of the view, after its refresh; no other such file is left."""
        code, rows = self.command("rollouts", "query", "SELECT rollout_id FROM rollouts")
        assert code == 0
        view = view_of(self.settings)
        assert {str(path) for path in view.folder.glob("*.parquet")} == set(view.paths())
        return {row["rollout_id"] for row in rows}

    def verified(self) -> None:
        """The verifier, which knows the tasks that a run asked for itself, finds nothing wrong, open ones aside."""
        _, verified = self.command("verify", RUN)
        assert {problem["kind"] for problem in verified["problems"]} <= {"open"}, verified["problems"]

    def forgotten(self, wanted: Collection[str]) -> None:
        """The replay refuses and names these rollouts alone."""
        with pytest.raises(BadRollouts) as refused:
            replay(RUN, self.settings)
        named = sorted((problem.kind, problem.rollout_id) for problem in refused.value.problems)
        assert named == sorted(("forgotten", rollout_id) for rollout_id in wanted)
