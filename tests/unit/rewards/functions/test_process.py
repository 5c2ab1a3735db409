"""Reward functions in their process: what goes wrong is named with file and line, and costs one reward at most."""

import asyncio
import json
import logging
import os
import pickle
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Result, Verifier
from streams.apps.scoring.judging import Judging
from streams.runtime.call_cache import CallSlots
from tentalis.rewards.functions.arguments import Call
from tentalis.rewards.functions.errors import BadFunction, FunctionError, FunctionTimeout
from tentalis.rewards.functions.process import FunctionProcess, ProcessSettings
from tentalis.rewards.functions.reply import FunctionValue
from tentalis.rewards.functions.scorer import FunctionScorer, load
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.rewards.verdict import BadVerifierData, ScorerAway, Verdict
from tests.support import ROOT
from tests.support.stream_records import make_result, make_task

BAD = ROOT / "tests" / "support" / "bad_rewards.py"


def answer(text: str = "fine", **columns: Any) -> Result:
    task = make_task(verifier=Verifier(name="reward", data=json.dumps({"columns": columns})))
    return make_result(task, text=text)


def score(scorer: FunctionScorer, text: str = "fine", **columns: Any) -> Verdict:
    result = answer(text, **columns)
    return scorer.verify(result.task, result)


@contextmanager
def scorer_of(name: str, path: Path = BAD, **settings: Any) -> Iterator[FunctionScorer]:
    scorer = load(f"{path}:{name}", **settings)
    yield scorer
    scorer.close()


def test_a_failure_is_named_with_the_line_of_the_function() -> None:
    names = ["raises", "nan", "word", "wrong_length", "greedy", "leaves", "changes", "imports_torch", "moody"]
    process = FunctionProcess(
        ProcessSettings(tuple(f"{BAD}:{name}" for name in names), (BAD.parent,), "auto", memory_mb=2_048)
    )
    call = Call([{"role": "user", "content": "?"}], "fine", [], {"solution": []})
    values = dict(zip(names, process.call(pickle.dumps(call), 90.0).values, strict=True))
    process.close()

    def said(value: FunctionValue) -> str:
        assert value.error is not None
        return f"{Path(value.error.where).name}: {value.error.message}"

    assert said(values["raises"]) == "bad_rewards.py:11: ZeroDivisionError: division by zero"
    traceback = values["raises"].error
    assert traceback is not None and "len(completion) / least" in traceback.traceback
    assert "tentalis/rewards" not in traceback.traceback
    assert said(values["nan"]).startswith("bad_rewards.py:14: it returned nan")
    assert said(values["word"]).startswith("bad_rewards.py:18: it returned 'good'")
    assert said(values["wrong_length"]).startswith("bad_rewards.py:22: it returned 2 rewards for 1 completion")
    assert said(values["greedy"]) == "bad_rewards.py:27: MemoryError"
    assert said(values["leaves"]) == "bad_rewards.py:31: SystemExit: enough"
    assert values["changes"] == FunctionValue(reward=1.0, changed=("solution",))
    assert values["imports_torch"].reward == 0.25
    assert values["moody"].reward == 0.5


def test_the_first_failure_is_logged_with_row_and_answer_and_further_ones_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said() -> list[str]:
        return [record.message for record in caplog.records if record.name == "tentalis.rewards.functions.scorer"]

    with scorer_of("raises") as scorer:
        for number in range(11):
            of = answer("y" * 300 if number else "first")
            task = of.task.model_copy(update={"metadata": {"line": str(number + 1)}})
            with pytest.raises(FunctionError, match="ZeroDivisionError"):
                scorer.verify(task, of)
    first, tenth = said()
    assert first.startswith(
        f"{BAD}:11: raises: ZeroDivisionError: division by zero (on the answer 'first' in row 1):\n"
    )
    assert "    return len(completion) / least" in first and "tentalis/rewards" not in first
    assert tenth == (
        f"10 failures so far: {BAD}:11: raises: ZeroDivisionError: division by zero (on the answer '{'y' * 200}...' "
        "in row 10)"
    )
    caplog.clear()
    with scorer_of("nan") as scorer, pytest.raises(FunctionError):
        score(scorer)
    (nan,) = said()
    assert "bad_rewards.py:14: nan: it returned nan" in nan and nan.endswith("(on the answer 'fine')")
    caplog.clear()
    with scorer_of("moody", time_limit_s=0.5) as scorer, pytest.raises(FunctionTimeout):
        score(scorer, "hangs")
    (late,) = said()
    assert "the call took longer than 0.5 s" in late and late.endswith("(on the answer 'hangs')")


def test_a_gigabyte_of_output_is_bounded_and_the_reward_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tentalis.rewards.functions.output")
    with scorer_of("prints_a_gigabyte", time_limit_s=90.0) as scorer:
        assert score(scorer).reward == 1.0
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "bad_rewards.py:prints_a_gigabyte prints: before"
    assert sum(map(len, lines)) < 10_000
    assert any("more bytes, which are not shown" in line for line in lines)


def test_a_call_that_hangs_crashes_or_exits_costs_its_own_reward_only() -> None:
    with scorer_of("moody", time_limit_s=2.0) as scorer:
        with pytest.raises(FunctionTimeout, match=rf"^{BAD}:55: the call took longer than 2 s .* raise time_limit_s"):
            score(scorer, "hangs")
        assert score(scorer).reward == 0.5
        with pytest.raises(FunctionError, match=rf"^{BAD}:57: the process was ended by SIGSEGV"):
            score(scorer, "crashes")
        assert score(scorer).reward == 0.5


def test_a_process_that_somebody_kills_costs_no_reward() -> None:
    with scorer_of("moody") as scorer:
        (child,) = [process for process in _children() if "tentalis.rewards.functions.child" in process[1]]
        os.kill(child[0], signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(score, scorer)
            os.killpg(child[0], signal.SIGKILL)
            assert waiting.result().reward == 0.5


def _children() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if int(parent) == os.getpid():
                found.append((int(entry.name), command))
    return found


def test_coroutines_run_at_the_same_time_and_one_that_blocks_harms_no_other() -> None:
    with scorer_of("moody_coroutine", time_limit_s=4.0) as scorer, ThreadPoolExecutor(2) as pool:
        assert [verdict.reward for verdict in pool.map(partial(score, scorer), ["meets", "meets"])] == [0.5, 0.5]
    with scorer_of("moody_coroutine", time_limit_s=2.0) as scorer, ThreadPoolExecutor(4) as pool:
        with pytest.raises(FunctionTimeout, match=rf"^{BAD}:69: moody_coroutine took longer than 2 s"):
            score(scorer, "sleeps")
        calls = [pool.submit(score, scorer, text) for text in ("fine", "blocks", "fine")]
        assert calls[0].result().reward == calls[2].result().reward == 0.5
        with pytest.raises(FunctionTimeout, match=rf"^{BAD}:71: the call took longer than 2 s"):
            calls[1].result()


async def _judged(judging: Judging, *texts: str) -> list[Verdict]:
    slots = CallSlots(asyncio.Semaphore(8))
    return await asyncio.gather(*(judging.slowly(answer(text), slots) for text in texts))


def test_scoring_leaves_the_reward_unknown_and_counts_the_reason() -> None:
    judging = Judging()
    with scorer_of("moody", time_limit_s=3.0) as scorer:
        before = dict(ENVIRONMENTS["chat"])
        ENVIRONMENTS["chat"]["reward"] = scorer
        try:
            # Three slow calls take longer than the limit of one, which does not count the wait for the others.
            fine, *others = asyncio.run(_judged(judging, "slow", "slow", "slow", "raises", "hangs"))
            assert fine == others[0] == others[1] == Verdict(0.5)
            assert others[2] == Verdict.unknown(failed_calls=1.0, timed_out=0.0)
            assert others[3] == Verdict.unknown(failed_calls=1.0, timed_out=1.0)
        finally:
            ENVIRONMENTS["chat"] = before
    assert judging.ended == {"answered": 3, "failed": 1, "timeout": 1, "away": 0} and judging.unknown == 2
    assert scorer.inner_steps >= 4


def test_a_changed_function_is_another_scorer_and_is_not_used_under_the_old_name(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("from helper import half\ndef score(completion):\n    return half\n", encoding="utf-8")
    helper = tmp_path / "helper.py"
    helper.write_text("half = 0.5\n", encoding="utf-8")
    with scorer_of("score", path) as scorer:
        assert scorer.name.startswith(f"rewards.py:score/{scorer.description.source[:12]}+")
        assert score(scorer).reward == 0.5
        helper.write_text("half = 0.25\n", encoding="utf-8")
        assert score(scorer).reward == 0.5, "the process still has the source of its name"
        scorer.close()
        with pytest.raises(ScorerAway, match="the source has changed since scoring started"):
            score(scorer)
        helper.write_text("half = 0.5\n", encoding="utf-8")
        assert score(scorer).reward == 0.5
    before = scorer.name
    with scorer_of("score", path, range=(0.0, 1.0)) as scorer:
        assert scorer.name.split("+")[0] == before.split("+")[0] and scorer.name != before


def test_a_rubric_gives_its_functions_weights_and_parser() -> None:
    with scorer_of("rubric") as scorer:
        assert [each.name for each in scorer.description.functions] == ["brief", "parsed"]
        assert score(scorer, "fine", answer="FINE") == Verdict(0.0, {"brief": -0.5, "parsed": 1.0})
        result = answer("fine")
        with pytest.raises(BadVerifierData, match=r"bad_rewards\.py:\d+: parsed needs answer, and the row has no"):
            scorer.check(result.task)


def test_a_plain_function_may_have_an_event_loop_of_its_own() -> None:
    with scorer_of("own_loop") as scorer:
        assert score(scorer).reward == 0.5


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("def score(text, label): ...", "score", r"rewards\.py:1: score cannot be called: its parameters"),
        ("x = 1\nimport no_such_module\n", "score", r"rewards\.py:2: ModuleNotFoundError: No module named"),
        ("x = 1\ndef score(:\n", "score", r"rewards\.py:2: invalid syntax"),
        ("import os\nos._exit(4)", "score", "exit code 4.* while it imported the module"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, text: str, name: str, says: str
) -> None:
    (tmp_path / "rewards.py").write_text(text, encoding="utf-8")
    with pytest.raises(BadFunction, match=says):
        load(f"rewards.py:{name}", base=tmp_path)


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFunction, match=r"none\.py: no such file"):
        load("none.py:score", base=tmp_path)
    with pytest.raises(BadFunction, match=r"is not FILE\.py:FUNCTION"):
        load("rewards.py")
    with pytest.raises(BadFunction, match="2 for 1 functions: give one for each"):
        load("rewards.py:score", weights=[1.0, 2.0])
    with pytest.raises(BadFunction, match="the first number must be less"):
        load("rewards.py:score", range=(1.0, 0.0))
    with pytest.raises(BadFunction, match=r"python_path: .* is not a folder"):
        load(f"{BAD}:moody", python_path=[str(tmp_path / "none")])


def test_a_generator_of_rewards_is_read_and_its_failure_is_the_functions(tmp_path: Path) -> None:
    rewards = tmp_path / "lazy_rewards.py"
    rewards.write_text(
        "def lazy(completions, length):\n"
        "    return (len(completion) / most for completion, most in zip(completions, length))\n"
    )
    with scorer_of("lazy", rewards) as scorer:
        assert score(scorer, "fine", length=8).reward == 0.5
        with pytest.raises(FunctionError, match=r"lazy_rewards\.py:2: lazy: ZeroDivisionError"):
            score(scorer, "fine", length=0)
