"""The remark on a useless reward while a run goes on, and the result in words."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tentalis.agents.manager.curriculum import Pool
from tentalis.demo.report import html_of
from tentalis.demo.stats import RunStats
from tentalis.learning.check import solve_rate
from tentalis.learning.compare import compare
from tentalis.learning.findings import judge_rewards
from tentalis.learning.function_log import FunctionLog
from tentalis.learning.options import LearnOptions
from tentalis.learning.play import JUDGED_ANSWERS, LearnShow
from tentalis.learning.result import LearnResult, SamplePair, _report
from tentalis.learning.sample import ScoredAnswer
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, T0, ack, manifest, outcome, task, update


def stats_of(rewards: list[float | None]) -> RunStats:
    stats = RunStats(RUN)
    stats.apply(manifest(steps=1), T0)
    of = task("t", n=len(rewards))
    stats.apply(of, T0)
    for index, reward in enumerate(rewards):
        stats.apply(outcome(of, index, version=1, reward=reward), T0)
    stats.apply(update(2), T0)
    stats.apply(ack(2), T0)
    return stats


def show(functions: FunctionLog | None = None, recorded: list[int | None] | None = None) -> LearnShow:
    nobody = cast(
        Any, SimpleNamespace(status=lambda: {"worker": {}}, environment="chat", policy="assistant", run_id=RUN)
    )
    options = LearnOptions("p.jsonl", ("r.py:f",))
    silent = cast(Any, SimpleNamespace(new=list))
    record = cast(Any, SimpleNamespace(update=[].append if recorded is None else recorded.append))
    log = functions or silent
    return LearnShow(nobody, options, nobody, Settings(), "", nobody, nobody, threading.Event(), log, record)


@pytest.mark.parametrize(
    ("rewards", "remark"),
    [
        ([0.5] * JUDGED_ANSWERS, "The reward is constant: each of 64 answers has 0.5"),
        ([0.0, 0.1] * (JUDGED_ANSWERS // 2), "No answer reaches 0.5"),
        ([None] * JUDGED_ANSWERS, "The reward of every answer is unknown"),
        ([0.0, 1.0] * (JUDGED_ANSWERS // 2), None),
        ([0.0, 1.0, 1.0, None] * (JUDGED_ANSWERS // 4), "16 of 64 answers is unknown: these are not trained on."),
        ([0.0, 1.0, 1.0, None] * (JUDGED_ANSWERS // 4), "A reward that is not between -1 and 1 needs --reward-range"),
        ([0.5] * (JUDGED_ANSWERS - 1), None),
    ],
)
def test_a_useless_reward_is_reported_after_the_first_answers(rewards: list[float | None], remark: str | None) -> None:
    watching = show()
    said = watching.watch.notice(stats_of(rewards)) if watching.watch.notice else None
    assert said is None if remark is None else said is not None and remark in said


def test_a_reward_that_was_good_is_not_judged_again() -> None:
    watching = show()
    assert watching.watch.notice is not None
    assert watching.watch.notice(stats_of([0.0, 1.0] * 32)) is None
    assert watching.watch.notice(stats_of([0.0] * 64)) is None


@pytest.mark.parametrize(
    ("loss", "groups", "sign"),
    [
        ("dynamic_sampling: true, opd_weight: 0, max_equal_batches: 4", 2, True),
        ("dynamic_sampling: true, opd_weight: 0, max_equal_batches: 4", 1, False),
        ("dynamic_sampling: true, opd_weight: 0, max_equal_batches: 1", 1, True),
        ("dynamic_sampling: false, opd_weight: 0, max_equal_batches: 1", 1, False),
        ("dynamic_sampling: true, opd_weight: 1, max_equal_batches: 1", 1, False),
    ],
)
def test_equal_rewards_are_said_before_the_run_is_given_up(loss: str, groups: int, sign: bool) -> None:
    watching, stats = show(), RunStats(RUN)
    plain = manifest(steps=1, batch=8)
    stats.apply(plain.model_copy(update={"config": f"{plain.config}loss: {{{loss}}}\n"}), T0)
    for number in range(groups + 1):
        of = task(f"t{number}", n=8)
        stats.apply(of, T0)
        for index in range(8):
            reward = 0.75 if number < groups else index / 8  # the last group is not equal
            stats.apply(outcome(of, index, version=3, reward=reward), T0)
    said = watching.watch.notice(stats) if watching.watch.notice else None
    assert (said is not None and f"The last {groups} batches of version 3 had equal rewards" in said) == sign
    assert watching.watch.notice is not None and watching.watch.notice(stats) is None


def test_the_kafka_is_recorded_with_the_first_records_read(tmp_path: Path) -> None:
    recorded: list[int | None] = []
    notice = show(recorded=recorded).watch.notice
    assert notice is not None
    notice(RunStats(RUN))
    stats = stats_of([0.5])
    stats.apply(manifest(steps=1).model_copy(update={"event_time": T0 + 9}), T0 + 9)  # of a later start
    notice(stats)
    assert recorded == [None, T0]


def test_what_the_functions_print_is_shown_beside_the_remarks(tmp_path: Path) -> None:
    watching = show(FunctionLog(tmp_path))
    assert watching.watch.notice is not None and watching.watch.notice(stats_of([0.5])) is None
    (tmp_path / "scoring.log").write_text(
        "2026-01-31 12:00:00,000 INFO tentalis.rewards.functions.output: r.py prints: \x1b[2Jhello\n"
    )
    said = str(watching.watch.notice(stats_of([0.5] * JUDGED_ANSWERS))).splitlines()
    assert said[0] == "r.py prints: \N{REPLACEMENT CHARACTER}[2Jhello" and str(tmp_path / "scoring.log") in said[1]
    assert said[2].startswith("The reward is constant")


def result(**more: Any) -> LearnResult:
    answers = ScoredAnswer("<b>short</b>", 1.0, {}), ScoredAnswer("long\x1b[2J", None, {}, "it took too long")
    values: dict[str, Any] = {
        "run_id": RUN,
        "stats": stats_of([0.0, 1.0]),
        "steps": 1,
        "newest": "assistant@v2",
        "comparison": compare([0.0, 0.0], [1.0, 0.5]),
        "samples": [SamplePair("why?", *answers)],
        "problems": ["it took too long"],
        "wall_seconds": 3.0,
        "start_seconds": 1.25,
        "resumed": False,
        "prompts": "p.jsonl: 20, 2 held out",
        "rewards": ("r.py:f",),
        "config": "steps: 1",
    }
    return LearnResult(**values | more)


def test_the_result_names_adapter_comparison_and_next_commands() -> None:
    found = result()
    as_json = found.as_json(Path("/r.html"))
    assert as_json["adapter"] == found.adapter and Path(found.adapter).is_absolute()
    assert as_json["held_out"]["difference"]["mean"] == 0.75
    assert as_json["samples"][0]["after"] == {"answer": "long\x1b[2J", "reward": None}
    assert as_json["start_seconds"] == 1.2 and as_json["seconds_by_phase"] == {"serving": 0.0}
    assert found.commands[2] == "tentalis policy export assistant@v2 --format safetensors --to assistant-v2"
    assert "difference 0.750" in found.held_out_sentence()
    assert result(comparison=None).held_out_sentence().endswith("after: it took too long.")


def test_the_report_escapes_answers_and_shows_their_rewards() -> None:
    page = html_of(_report(result()), b"png")
    assert "&lt;b&gt;short&lt;/b&gt;\n[reward 1.000]" in page
    assert "\x1b" not in page and "[reward unknown: it took too long]" in page
    assert "Reward on 2 held-out prompts" in page
    assert "<td>seconds until the first task</td><td>1.2</td>" in page


def test_the_result_has_the_pools_of_the_curriculum() -> None:
    assert result().as_json(Path("/r.html"))["pools"] is None
    assert "solve rate" not in html_of(_report(result()), b"png")
    chosen = result(pools={Pool.UNSEEN: 0, Pool.LEARNABLE: 7, Pool.HARD: 2})
    assert chosen.as_json(Path("/r.html"))["pools"] == {"unseen": 0, "learnable": 7, "hard": 2}
    assert "<td>prompts by solve rate</td><td>7 learnable, 2 hard</td>" in html_of(_report(chosen), b"png")


def test_the_solve_rate_in_words() -> None:
    assert solve_rate(judge_rewards([[0.0, 1.0]], ranged=False)) == (
        "solve rate: 50% of 2 answers reach 0.5, the middle of 0 to 1"
    )
    assert solve_rate(judge_rewards([[None]], ranged=False)).startswith("solve rate: unknown")
