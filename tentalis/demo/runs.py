"""The runs of a state directory: STATE/runs/<run_id>/ with the trainer's configuration and a mark when finished."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tentalis.agents.scenarios import Scenario
from tentalis.policies.core import versions_held

TASKS_PER_STEP = 4

ONE_RIGHT_FORM = {
    "min_length": 0.0,
    "min_length_ratio": 0.0,
    "max_kl": 100.0,
    "min_distinct_ratio": 0.0,
    "max_similarity": 1.0,
}
"""The guard's limits where only a rule decides: an answer of one number is short, and like the other answers."""

Configured = Callable[[dict[str, Any], tuple[str, ...]], dict[str, Any]]
"""Function from trainer settings and the user's changes to the changed settings."""


@dataclass(frozen=True, slots=True)
class RunKind:
    """The options that identify a run: a demo continues only an unfinished run with equal ones."""

    scenario: str
    steps: int
    base_model: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run. `resumed`: an earlier command began it."""

    run_id: str
    folder: Path
    resumed: bool

    @property
    def config(self) -> Path:
        """The trainer's configuration file."""
        return self.folder / "config.yaml"

    @property
    def finished(self) -> bool:
        """True if the run has come to its end."""
        return (self.folder / "finished").exists()

    def finish(self) -> None:
        """Marks the run as finished: the same command begins another."""
        (self.folder / "finished").write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Run(RunFolder):
    """The folder of a run of the demo."""

    @property
    def scenario(self) -> str | None:
        """The scenario of the run, or None."""
        kind = self.folder / "demo.json"
        return str(json.loads(kind.read_text(encoding="utf-8"))["scenario"]) if kind.exists() else None


def unfinished(runs: Path, kind: RunKind) -> Run | None:
    """Returns the newest unfinished run of this kind, or None."""
    for folder in sorted(runs.glob("demo-*"), reverse=True):
        run = Run(folder.name, folder, resumed=True)
        if run.finished or not run.config.exists():
            continue
        try:
            found = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
            found = RunKind(**found | {"changes": tuple(found.get("changes", ()))})
        except (OSError, ValueError, TypeError):  # interrupted before the file was complete
            continue
        if found == kind:
            return run
    return None


def newest(runs: Path) -> Run | None:
    """Returns the newest run of any kind, or None."""
    configs = sorted(runs.glob("*/config.yaml"), key=lambda path: (path.stat().st_mtime_ns, path))
    return Run(configs[-1].parent.name, configs[-1].parent, resumed=True) if configs else None


def unchanged(config: dict[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings as they are. Raises ValueError if there are changes."""
    if changes:
        raise ValueError(f"no function is given to apply the changes {changes}")
    return config


def open_run(runs: Path, kind: RunKind, scenario: Scenario, now: float, configured: Configured = unchanged) -> Run:
    """Returns the unfinished run of this kind, or creates one named after `now` (seconds since the epoch)."""
    found = unfinished(runs, kind)
    if found is not None:
        return found
    stamp = int(now)
    while (folder := runs / time.strftime("demo-%Y%m%d-%H%M%S", time.gmtime(stamp))).exists():
        stamp += 1
    config = yaml.safe_dump(configured(trainer_config(folder.name, kind, scenario), kind.changes), sort_keys=False)
    folder.mkdir(parents=True)
    (folder / "demo.json").write_text(json.dumps(asdict(kind), indent=1), encoding="utf-8")
    # Written last: without its configuration, the run does not count as begun.
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return Run(folder.name, folder, resumed=False)


def unused_applications(config: Path) -> frozenset[str]:
    """Returns the names of the applications whose output the run of a configuration file does not read: hinting, if its
    distillation part has no weight."""
    loss = yaml.safe_load(config.read_text(encoding="utf-8")).get("loss") or {}
    return frozenset() if float(loss.get("opd_weight", 1.0)) > 0 else frozenset({"hinting"})


def whole_models(config: Path) -> int:
    """Returns the most fully trained versions that the model server holds for the run of a configuration file."""
    return versions_held(yaml.safe_load(config.read_text(encoding="utf-8"))["max_staleness"])


def trainer_config(run_id: str, kind: RunKind, scenario: Scenario) -> dict[str, Any]:
    """Returns the settings for a demo: on-policy steps of 4 tasks, an adapter of rank 16, learning rate 3e-4, and new
    versions that are served if they pass the guard."""
    guard = {} if scenario.owes_feedback else {"guard": dict(ONE_RIGHT_FORM)}
    return {
        "run_id": run_id,
        "policy": scenario.policy,
        "base_model": kind.base_model,
        "base_model_name": Path(kind.base_model).name,
        "steps": kind.steps,
        "batch_rollouts": TASKS_PER_STEP * scenario.n_samples,
        "max_staleness": 0,
        "promotion": "guarded",
        **guard,
        "seed": 0,
        "lora": {"rank": 16, "alpha": 32.0, "targets": "all-linear"},
        "optimizer": {"lr": 3e-4},
        "loss": {"rl_weight": 1.0, "opd_weight": 1.0 if scenario.terms.opd else 0.0},
    }
