"""A whole run of `tentalis learn` compared with TRL's GRPOTrainer, whose own `generate` samples, in turns.

Both train the same model (BENCH_MODEL, SmolLM2-135M, float32) on the questions of the demo with the taste of its users
as the reward: BENCH_STEPS (15) steps of 4 prompts with 8 answers of at most 64 tokens, LoRA r16 on all linear layers,
learning rate 3e-4, temperature 0.7, for BENCH_SEEDS (3) seeds from 0. `tentalis learn` trains on rewards alone. The
command that runs first alternates. Both have all cores.

Few answers of the base model earn a reward, so most groups have equal rewards at first. TRL then takes a step without
a gradient. With BENCH_DYNAMIC=0 (default) `tentalis learn` does not sample dynamically either, so that both sample the
same number of answers. With BENCH_DYNAMIC=1 it does, and may give the run up, which fails the benchmark.

Each figure is the median over the seeds:

- `wall_s`: from the start of the command to its end: everything that starts, downloads aside, and everything that ends.
  For `tentalis learn` that includes the broker, all applications and the comparison on one held-out prompt.
- `cpu_s`: user and system time of the command and all of its descendants.
- `peak_mb`: most memory of them together (PSS, so that shared pages count once).
- `reward`: mean reward of the last quarter of the training answers. All answers that the function scored are counted.
- `to_0.6_s`: seconds from the start of the command until the mean of the last WINDOW training answers first passes 0.6;
  null if it does not in half of the seeds.

Ratios are TRL's figure divided by ours. BENCH_KEEP names a folder for the logs of all runs.
"""

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tentalis.agents.scenarios.assistant import SHOWCASE, Assistant, questions
from tentalis.inference.models import resolve_model
from tentalis.local.jars import fetch_jars
from tentalis.service.settings import Settings
from tests.bench.lab import environment_with, log, report
from tests.bench.process_tree import TreeUsage, run_measured
from tests.bench.trl_job import PACKAGES
from tests.support import ROOT

WINDOW = 64
PASSED = 0.6
PROMPTS_PER_STEP, GROUP, LR, RANK, ALPHA = 4, Assistant.n_samples, 3e-4, 16, 32
MAX_TOKENS, TEMPERATURE = Assistant.sampling.max_tokens, Assistant.sampling.temperature


@dataclass(frozen=True, slots=True)
class LearnFigures:
    """The figures of one run. `to_passed_s` is infinite if the running mean did not pass PASSED."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    reward: float
    to_passed_s: float


def scored_answers(text: str) -> list[tuple[float, float]]:
    """Returns time and reward of the lines that learn_reward.py wrote, in the order of time."""
    return sorted((float(at), float(reward)) for at, reward in map(str.split, text.splitlines()))


def figures_of(usage: TreeUsage, scored: Sequence[tuple[float, float]]) -> LearnFigures:
    """Returns the figures of a run. Raises ValueError if it scored no answer."""
    if not scored:
        raise ValueError("no training answer was scored: the log of the run says why")
    rewards = [reward for _, reward in scored]
    quarter = rewards[-max(1, len(rewards) // 4) :]
    ends = range(WINDOW, len(rewards) + 1)
    passed = next((end for end in ends if statistics.fmean(rewards[end - WINDOW : end]) > PASSED), None)
    to_passed = math.inf if passed is None else scored[passed - 1][0] - usage.began
    return LearnFigures(usage.wall_s, usage.cpu_s, usage.peak_mb, statistics.fmean(quarter), to_passed)


def medians(runs: Sequence[LearnFigures]) -> dict[str, float | None]:
    """Returns the medians over the seeds."""
    passed = statistics.median(run.to_passed_s for run in runs)
    return {
        "wall_s": round(statistics.median(run.wall_s for run in runs), 1),
        "cpu_s": round(statistics.median(run.cpu_s for run in runs), 1),
        "peak_mb": round(statistics.median(run.peak_mb for run in runs)),
        "reward": round(statistics.median(run.reward for run in runs), 4),
        f"to_{PASSED}_s": None if math.isinf(passed) else round(passed, 1),
    }


@dataclass(frozen=True)
class LearnBench:
    """The two commands of one seed, in a folder."""

    folder: Path
    model: Path
    steps: int
    seed: int
    dynamic: bool = False

    def ours(self) -> LearnFigures:
        """Runs `tentalis learn`."""
        prompts, held_out = self._write_prompts("ours"), self.folder / "held-out.jsonl"
        write_rows(held_out, SHOWCASE[:1], record="")
        command = [sys.executable, "-m", "tentalis.cli", "learn", str(prompts), "--eval", str(held_out)]
        command += ["--reward", f"{ROOT / 'tests/bench/learn_reward.py'}:score", "--model", str(self.model)]
        command += ["--steps", str(self.steps), "--group", str(GROUP), "--max-tokens", str(MAX_TOKENS)]
        command += ["--temperature", str(TEMPERATURE), "--seed", str(self.seed), "--eval-prompts", "1"]
        changes = {
            "batch_rollouts": PROMPTS_PER_STEP * GROUP,
            "optimizer.lr": LR,
            "lora.rank": RANK,
            "lora.alpha": float(ALPHA),
            "base_dtype": "float32",
            "loss.dynamic_sampling": "true" if self.dynamic else "false",
        }
        command += [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
        # Nothing of a stack of the person who runs the benchmark.
        foreign = {name for name in os.environ if name.startswith("TENTALIS_")} - {"TENTALIS_CACHE"}
        env = {name: value for name, value in os.environ.items() if name not in foreign}
        return self._measured("ours", command, env | {"TENTALIS_HOME": str(self.folder / "home")})

    def trl(self, python: str) -> LearnFigures:
        """Runs TRL in its environment."""
        job = {
            "model": str(self.model),
            "prompts": str(self._write_prompts("trl")),
            "steps": self.steps,
            "prompts_per_step": PROMPTS_PER_STEP,
            "group": GROUP,
            "max_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
            "lr": LR,
            "rank": RANK,
            "alpha": ALPHA,
            "seed": self.seed,
            "threads": os.cpu_count() or 1,
            "output": str(self.folder / "trl-adapter"),
        }
        file = self.folder / "trl.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        return self._measured("trl", [python, "-m", "tests.bench.learn_trl", str(file)], env)

    def _write_prompts(self, name: str) -> Path:
        path = self.folder / f"{name}.jsonl"
        write_rows(path, questions(), record=str(self._scored(name)))
        return path

    def _scored(self, name: str) -> Path:
        return self.folder / f"{name}.scored"

    def _measured(self, name: str, command: list[str], env: dict[str, str]) -> LearnFigures:
        path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        written = self.folder / f"{name}.log"
        with written.open("wb") as output:
            try:
                usage = run_measured(command, env | {"PYTHONPATH": path}, self.folder, output)
            except BaseException:
                log(written.read_text(encoding="utf-8", errors="replace")[-5000:])
                raise
        figures = figures_of(usage, scored_answers(self._scored(name).read_text(encoding="utf-8")))
        log(f"seed {self.seed}, {name}: {figures}")
        return figures


def write_rows(path: Path, asked: Sequence[str], record: str) -> None:
    """Writes prompts with the columns of learn_reward.py."""
    rows = ({"prompt": text, "question": text, "limit": MAX_TOKENS, "record": record} for text in asked)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measure(folder: Path, steps: int, seeds: int) -> dict[str, Any]:
    """Runs both commands for every seed in turns and returns the result."""
    cache = Settings.from_env().cache
    fetch_jars(cache)
    model = resolve_model(os.environ.get("BENCH_MODEL"), cache)
    python = environment_with("bench-trl", PACKAGES)
    runs: dict[str, list[LearnFigures]] = {"ours": [], "trl": []}
    for seed in range(seeds):
        place = folder / f"seed{seed}"
        place.mkdir(parents=True)
        bench = LearnBench(place, model, steps, seed, os.environ.get("BENCH_DYNAMIC", "0") == "1")
        for name in ("ours", "trl") if seed % 2 == 0 else ("trl", "ours"):
            runs[name].append(bench.ours() if name == "ours" else bench.trl(python))
    median = {name: medians(found) for name, found in runs.items()}
    ratios = {
        f"ratio_{of}": round(
            statistics.median(getattr(run, f"{of}_s") for run in runs["trl"])
            / statistics.median(getattr(run, f"{of}_s") for run in runs["ours"]),
            3,
        )
        for of in ("wall", "cpu")
    }
    return median | ratios | {"steps": steps, "seeds": seeds, "cores": os.cpu_count()}


def main() -> None:
    """Runs the benchmark."""
    steps, seeds = int(os.environ.get("BENCH_STEPS", "15")), int(os.environ.get("BENCH_SEEDS", "3"))
    kept = os.environ.get("BENCH_KEEP")
    if kept is not None:
        report(**measure(Path(kept).absolute(), steps, seeds))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(**measure(Path(folder), steps, seeds))


if __name__ == "__main__":
    main()
