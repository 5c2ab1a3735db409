"""The figures of the benchmark `learn`: from the times and rewards of the answers, and over the seeds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.bench_learn import PASSED, WINDOW, LearnFigures, figures_of, medians, scored_answers
from tests.bench.learn_reward import score
from tests.bench.process_tree import TreeUsage

USAGE = TreeUsage(began=100.0, wall_s=50.0, cpu_s=80.0, peak_mb=900.0)
GOOD = "The bread stays fresh in a paper bag, because the bag keeps it dry."


def test_the_moment_at_which_the_running_mean_passes_and_the_last_quarter() -> None:
    zeros, ones = WINDOW, WINDOW
    scored = [(101.0 + at, float(at >= zeros)) for at in range(zeros + ones)]
    found = figures_of(USAGE, scored)
    needed = int(PASSED * WINDOW) + 1
    assert found == LearnFigures(50.0, 80.0, 900.0, 1.0, 1.0 + zeros + needed - 1)


def test_a_mean_that_never_passes_is_null_in_the_result() -> None:
    never = figures_of(USAGE, [(101.0, 0.0)] * (WINDOW + 1))
    sometimes = figures_of(USAGE, [(101.0, 1.0)] * WINDOW)
    assert medians([never])["to_0.6_s"] is None and medians([never, sometimes, sometimes])["to_0.6_s"] == 1.0
    with pytest.raises(ValueError, match="no training answer was scored"):
        figures_of(USAGE, [])


def test_the_reward_records_training_answers_and_no_held_out_ones(tmp_path: Path) -> None:
    record = tmp_path / "scored"
    answers = [[{"role": "assistant", "content": text}] for text in (GOOD, GOOD, "")]
    question = ["How can I keep my bread fresh for longer?"] * 3
    rewards = score(answers, [[1] * 20, [1] * 64, [1]], question, [64] * 3, [str(record), str(record), ""])
    assert rewards == [1.0, 0.0, 0.0]  # the second one was cut off
    assert [reward for _, reward in scored_answers(record.read_text(encoding="utf-8"))] == [1.0, 0.0]


BUSY = """
import subprocess, sys, time
child = [sys.executable, "-c", "import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"]
subprocess.Popen(child)
"""


def test_the_time_of_a_process_that_its_parent_left_is_counted(tmp_path: Path) -> None:
    """In a process of its own, because a subreaper waits for every child."""
    code = (
        "import json, os, sys; from pathlib import Path; from tests.bench.process_tree import run_measured\n"
        f"used = run_measured([sys.executable, '-c', {BUSY!r}], os.environ, Path('.'), sys.stderr)\n"
        "print(json.dumps([used.cpu_s, used.wall_s]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cpu, wall = json.loads(done.stdout)
    assert cpu >= 0.3 and wall > 0
