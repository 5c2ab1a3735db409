"""The learning curves of docs/results: one demo per method and seed, drawn together.

`make results [STEPS=20] [SEEDS=3]` runs the missing demos one after another (each takes minutes and both cores), and
then writes `curves.png` and `README.md` beside the summaries. Earlier runs are kept: delete a summary to run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import methods
from tests.bench.lab import log
from tests.bench.methods import COLOURS, FOLDER, GREY, SETTINGS, Z_95, Curve


@dataclass(frozen=True, slots=True)
class Method:
    """A training method. `settings`: of the trainer; `seeds`: number of seeds, None for that of --seeds."""

    name: str
    scenario: str
    settings: tuple[str, ...]
    seeds: int | None = None

    def command(self, steps: int, seed: int) -> list[str]:
        """The arguments of `tentalis` for a run."""
        chosen = [argument for setting in (*self.settings, f"seed={seed}") for argument in ("--set", setting)]
        return ["demo", "--scenario", self.scenario, "--steps", str(steps), *chosen, "-o", "json"]


METHODS = (
    *(Method(name, "assistant", settings) for name, settings in SETTINGS.items()),
    Method("math-rl", "math", (), seeds=1),
)


def play(method: Method, steps: int, seed: int, into: Path) -> None:
    """Runs one demo in its own state directory; writes its summary to the file `into`.

    Raises RuntimeError if the demo failed; its state directory is kept.
    """
    home = Path(".tentalis/results").absolute() / into.stem
    log(f"{into.stem}: tentalis {' '.join(method.command(steps, seed))}")
    done = subprocess.run(
        [sys.executable, "-m", "tentalis.cli", *method.command(steps, seed)],
        env=os.environ | {"TENTALIS_HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{into.stem} ended with exit code {done.returncode}; see {home}")
    into.write_text(json.dumps(json.loads(done.stdout), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(home)


def played(method: Method) -> list[dict[str, Any]]:
    """The summaries of a method, by seed."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob(f"{method.name}-seed*.json"))]


def curve(method: Method, runs: Sequence[dict[str, Any]]) -> Curve:
    """Mean reward by policy version: over the seeds with their range, or of a single run with its 95 % interval.

    Covers the versions that every run has.
    """
    versions = list(zip(*(run["reward_by_version"] for run in runs), strict=False))
    middle = [statistics.fmean(row["mean"] for row in rows) for rows in versions]
    if len(runs) > 1:
        low, high = ([of(row["mean"] for row in rows) for rows in versions] for of in (min, max))
    else:
        half = [Z_95 * rows[0]["stderr"] for rows in versions]
        low, high = ([at + sign * by for at, by in zip(middle, half, strict=True)] for sign in (-1, 1))
    label = f"{method.name} ({len(runs)} seeds)" if len(runs) > 1 else method.name
    return Curve(label, COLOURS.get(method.name, GREY), [rows[0]["version"] for rows in versions], middle, low, high)


def draw(path: Path) -> None:
    """Draws one panel per scenario."""
    panels: dict[str, list[Curve]] = {}
    for method in METHODS:
        if runs := played(method):
            panels.setdefault(method.scenario, []).append(curve(method, runs))
    methods.draw(path, list(panels.items()), "policy version", "mean reward")


def table() -> str:
    """The figures of every run, in Markdown."""
    lines = [
        "| run | first quarter | last quarter | p (one-sided) | mean words | on topic | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        for path in sorted(FOLDER.glob(f"{method.name}-seed*.json")):
            run = json.loads(path.read_text(encoding="utf-8"))
            first, last = run["reward_by_version"][0], run["reward_by_version"][-1]
            topic = (
                ""
                if first["on_topic_share"] is None
                else f"{first['on_topic_share']:.0%} to {last['on_topic_share']:.0%}"
            )
            words = "" if first["mean_words"] is None else f"{first['mean_words']:.0f} to {last['mean_words']:.0f}"
            earned = [
                f"{run[quarter]['mean']:.3f} (n = {run[quarter]['n']})" for quarter in ("first_quarter", "last_quarter")
            ]
            lines.append(
                f"| {path.stem} | {earned[0]} | {earned[1]} | {run['p_value']:.1e} | {words} | {topic} "
                f"| {run['wall_seconds']:.0f} |"
            )
    return "\n".join(lines)


def write_page(steps: int) -> None:
    """Writes `curves.png` and `README.md` from the existing summaries. Keeps the page's sections, which are written by
    hand."""
    draw(FOLDER / "curves.png")
    commands = "\n".join(f"tentalis {' '.join(method.command(steps, 0))}" for method in METHODS)
    page = f"""# Learning curves

Made by `make results STEPS={steps}`: each run is one of these commands with a different seed, on {os.cpu_count()} cores
without a GPU (Python {platform.python_version()}). This folder has its summary as JSON. All runs are shown.

```
{commands}
```

![mean reward by policy version](curves.png)

The line is the mean over the seeds, and the shade reaches from the lowest seed to the highest; for a single run the
shade is the 95 % interval of the mean over the tasks of a version. The p-value is that of a permutation test over task
means, first against last quarter of the versions. Words and topic: first version to last.
Users do not complain in the math scenario, so there are no hints to distil: its only method is RL.

{table()}
"""
    place = FOLDER / "README.md"
    _, heading, sections = place.read_text(encoding="utf-8").partition("\n## ") if place.exists() else ("", "", "")
    place.write_text(page + heading + sections, encoding="utf-8")


def main() -> None:
    """Runs the missing demos, then draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draw-only", action="store_true", help="Draw the existing summaries, without new runs.")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = [
        (method, seed, FOLDER / f"{method.name}-seed{seed}.json")
        for seed in range(options.seeds)
        for method in METHODS
        if seed < (method.seeds or options.seeds)
    ]
    for method, seed, path in wanted:
        if not options.draw_only and not path.exists():
            play(method, options.steps, seed, path)
    write_page(options.steps)


if __name__ == "__main__":
    main()
