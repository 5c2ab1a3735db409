"""The join as a process of its own, on the broker of a test."""

import os
from pathlib import Path

from tests.support.apps_lab import partitions_owned
from tests.support.fork_server import ForkedProcess


class JoinWorker:
    """`tentalis serve join` as a process of its own."""

    def __init__(
        self,
        bootstrap: str,
        home: Path,
        name: str,
        *options: str,
        static: bool = True,
        main: tuple[str, ...] = ("-m", "tentalis.cli"),
    ) -> None:
        self.log = home / f"{name}.log"
        environment = os.environ | {"TENTALIS_BOOTSTRAP": bootstrap, "TENTALIS_HOME": str(home)}
        instance = ("--instance", "0") if static else ()
        self.process = ForkedProcess([*main, "serve", "join", *instance, *options], environment, self.log)

    def owned(self) -> set[int]:
        """The partitions that it owns, or owned last."""
        return partitions_owned(self.log.read_text())

    def end(self, kill: bool = False) -> int:
        """Ends it; its exit code."""
        (self.process.kill if kill else self.process.terminate)()
        return self.process.wait(10)
