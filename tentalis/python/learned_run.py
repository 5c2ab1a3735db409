"""The result of `tentalis.learn`: the rewards, the adapter, the replay and the answers of a finished run."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tentalis.cli.shared.settings import log_of
from tentalis.kafka.codec import make_codec
from tentalis.kafka.reader import records_to_end
from tentalis.python.answer_rows import TOPICS, answer_rows
from tentalis.service import variables
from tentalis.service.packages import how_to_install
from tentalis.service.settings import Settings


class ReplayFailed(RuntimeError):
    """A replay that ended without a report. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class RunReplay:
    """The report of a replay. `equal`: every step has the recorded sha256; None if nothing was compared.

    `steps`: step, recorded and replayed sha256, equal, of each. `problems`: reasons why nothing was trained.
    """

    equal: bool | None
    steps: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LearnedRun:
    """A finished run.

    Attributes:
        run_id: name of the run, for the commands (`tentalis replay RUN`).
        policy: the newest version, such as learn@v15.
        curve: mean reward by version, from the base model on.
        scores: reward by version with its standard error and number of answers.
        adapter: place of the newest adapter: a folder, or a URL of an object store.
        held_out: rewards of held-out prompts before and after, with intervals and p-value; None if all are unknown.
        samples: held-out questions with both answers.
        report: the HTML report.
    """

    run_id: str
    policy: str
    curve: tuple[float, ...]
    scores: tuple[Mapping[str, Any], ...]
    adapter: str
    held_out: Mapping[str, Any] | None
    samples: tuple[Mapping[str, Any], ...]
    report: Path
    _settings: Settings = field(repr=False)

    @classmethod
    def of_result(cls, result: Mapping[str, Any], settings: Settings) -> "LearnedRun":
        """Returns the run of the result that `tentalis learn -o json` prints."""
        scores = tuple(result["reward_by_version"])
        return cls(
            run_id=result["run_id"],
            policy=result["policy"],
            curve=tuple(score["mean"] for score in scores),
            scores=scores,
            adapter=result["adapter"],
            held_out=result["held_out"],
            samples=tuple(result["samples"]),
            report=Path(result["report"]),
            _settings=settings,
        )

    def replay(self) -> RunReplay:
        """Trains the run again from its records, in a process of its own, and compares the sha256 of every step.

        Raises ReplayFailed.
        """
        command = [sys.executable, "-m", "tentalis.cli", "replay", self.run_id, "-o", "json"]
        env = os.environ | {variables.HOME.name: str(self._settings.home)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        try:
            report = json.loads(done.stdout)
        except ValueError as error:
            raise ReplayFailed(
                f"the replay of {self.run_id} ended with exit code {done.returncode}: {done.stderr[-2000:].strip()}"
            ) from error
        return RunReplay(report["equal"], tuple(report["steps"]), tuple(report["problems"]))

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row for each answer of the run: prompt, completion, reward, components, policy, task_id,
        sample_index, columns. Reads the log, for which the broker is started if none runs."""
        with log_of(self._settings) as settings:
            return answer_rows(self.run_id, records_to_end(settings, TOPICS, make_codec(settings)))

    def to_dataset(self) -> Any:
        """Returns `rows` as a `datasets.Dataset`; components and columns of a row that has none are None.

        Raises ModuleNotFoundError without the package `datasets`, ValueError if a column of the prompts has values of
        different types.
        """
        try:
            from datasets import Dataset
            from pyarrow import ArrowException
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "to_dataset() needs the package datasets, in a version that fits the others: "
                f"{how_to_install('datasets')}. rows() returns the same as dicts",
                name="datasets",
            ) from error
        # Arrow has structs without fields, Parquet has not.
        rows = [row | {name: row[name] or None for name in ("components", "columns")} for row in self.rows()]
        try:
            return Dataset.from_list(rows)
        except ArrowException as error:
            raise ValueError(
                f"the columns of the prompts of run {self.run_id} have values of different types, which a Dataset does "
                f"not hold: {error}. rows() returns the same as dicts"
            ) from error
