"""`tentalis.learn`: its arguments become options, Ctrl-C and cancellation stop the run, the result is an object."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tentalis
from schemas.records import Record, Task, Verifier
from tentalis.learning import play
from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions
from tentalis.learning.sources import read_rows
from tentalis.python import learn as python_learn
from tentalis.python import learned_run
from tentalis.python.answer_rows import answer_rows
from tentalis.python.learn_arguments import LearnArguments, checked_arguments, options_of
from tentalis.python.learned_run import LearnedRun
from tentalis.python.progress_bar import TrainingBar
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, outcome, result, task

JUDGED = ("reward", "components", "policy")
ROWS = [{"prompt": f"q{number}", "letter": "e"} for number in range(4)]
RESULT = {
    "run_id": "learn-1",
    "policy": "learn@v2",
    "reward_by_version": [{"version": 0, "mean": 0.25}, {"version": 1, "mean": 0.5}],
    "adapter": "/adapters/v2",
    "held_out": None,
    "samples": [],
    "report": "/report.html",
}


def score(completions: list[str], letter: list[str], **columns: Any) -> list[float]:
    return [text.count(one) / 10 for text, one in zip(completions, letter, strict=True)]


def test_arguments_become_options(tmp_path: Path) -> None:
    given: Any = {
        "eval": ROWS[:1],
        "steps": 3,
        "weights": [2.0, 1.0],
        "columns": {"question": "prompt"},
        "eval_prompts": 5,
        "settings": {"optimizer.lr": 1e-4, "loss.kind": "gspo"},
        "curriculum": True,
        "new": True,
    }
    options = options_of(ROWS, [score, "rewards.py:other"], given, tmp_path, print)
    assert Path(options.source).parent == tmp_path / "datasets" == Path(str(options.held_out)).parent
    assert options.rewards == ("tests.unit.python.test_learn:score", "rewards.py:other")
    assert (options.steps, options.compared, options.new, options.weights) == (3, 5, True, (2.0, 1.0))
    assert options.curriculum
    assert options.columns == (("question", "prompt"),)
    assert options.changes == ("optimizer.lr=0.0001", "loss.kind=gspo")
    plain = options_of("p.jsonl", "r.py:f", {}, tmp_path, print)
    assert plain == LearnOptions("p.jsonl", ("r.py:f",), command=plain.command, emit=print)


@pytest.mark.parametrize("name", sorted(LearnArguments.__annotations__))
def test_an_argument_that_is_none_has_its_default(name: str, tmp_path: Path) -> None:
    plain = options_of("p.jsonl", "r.py:f", {}, tmp_path, print)
    assert options_of("p.jsonl", "r.py:f", checked_arguments({name: None}), tmp_path, print) == plain


def test_the_bar_is_shown_unless_it_is_switched_off(
    fake_training: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[bool] = []
    monkeypatch.setattr(python_learn, "TrainingBar", lambda on: (shown.append(on), TrainingBar(False))[1])
    for progress in (None, True, False):
        given: Any = {"progress": progress}
        tentalis.learn(ROWS, score, home=tmp_path, **given)
    assert shown == [True, True, False]


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no argument 'step', did you mean 'steps'"):
        checked_arguments({"step": 3})
    with pytest.raises(LearnError, match="group=1: give at least 2"):
        checked_arguments({"group": 1})
    with pytest.raises(LearnError, match="loss='OPD': give one of rl, opd, both"):
        checked_arguments({"loss": "OPD"})
    with pytest.raises(LearnError, match="1 reward functions with 2 weights"):
        options_of(ROWS, score, {"weights": (1.0, 2.0)}, tmp_path, print)


Stopping = Callable[[], AbstractContextManager[threading.Event]]


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The thread's work without processes: it waits for the stop event if `waits`."""
    found = SimpleNamespace(waits=False, begun=threading.Event(), ended=threading.Event(), options=None)

    def train(
        options: LearnOptions, settings: Any, configured: Any, console: Any, stopping: Stopping, view: Any
    ) -> bool:
        found.options = options
        asyncio.run(asyncio.sleep(0))  # the real one runs an event loop too
        found.begun.set()
        with stopping() as stop:
            if found.waits:
                stop.wait(60)
                found.ended.set()
                return False
        assert options.emit is not None
        options.emit(RESULT)
        return True

    monkeypatch.setattr(play, "train", train)
    return found


def test_the_run_is_an_object(fake_training: SimpleNamespace, tmp_path: Path) -> None:
    run = tentalis.learn(ROWS, score, home=tmp_path, progress=False)
    assert (run.run_id, run.curve, run.adapter) == ("learn-1", (0.25, 0.5), "/adapters/v2")
    assert fake_training.options.source.startswith(str(tmp_path)) and not Path(fake_training.options.source).exists()


def test_it_runs_beside_an_event_loop(fake_training: SimpleNamespace, tmp_path: Path) -> None:
    async def notebook() -> tuple[Any, Any]:
        awaited = await tentalis.learn_async(ROWS, score, home=tmp_path, progress=False)
        return awaited, tentalis.learn(ROWS, score, home=tmp_path, progress=False)

    awaited, waited = asyncio.run(notebook())
    assert awaited == waited


def test_a_cancelled_task_stops_the_run_before_it_ends(fake_training: SimpleNamespace, tmp_path: Path) -> None:
    fake_training.waits = True

    async def cancelled() -> bool:
        work = asyncio.create_task(tentalis.learn_async(ROWS, score, home=tmp_path, progress=False))
        await asyncio.to_thread(fake_training.begun.wait, 60)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return bool(fake_training.ended.is_set())

    assert asyncio.run(cancelled())


def test_ctrl_c_stops_the_run_before_it_is_raised(
    fake_training: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_training.waits = True
    waited = python_learn.RunThread.waited
    pressed: list[int] = []

    def interrupted(thread: Any) -> Any:
        fake_training.begun.wait(60)
        if not pressed:
            pressed.append(1)
            raise KeyboardInterrupt
        return waited(thread)

    monkeypatch.setattr(python_learn.RunThread, "waited", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tentalis.learn(ROWS, score, home=tmp_path, progress=False)
    assert fake_training.ended.is_set()


def test_a_timeout_of_the_run_itself_is_raised(
    fake_training: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> bool:
        raise TimeoutError("the broker does not answer")

    monkeypatch.setattr(play, "train", failing)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            tentalis.learn(ROWS, score, home=tmp_path, progress=False)
        except BaseException as error:  # noqa: BLE001 - looked at below
            raised.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(60)
    assert [str(error) for error in raised] == ["the broker does not answer"]


def test_rows_have_the_reward_of_their_answer() -> None:
    first, second, other = task("a", n=2), task("b", n=1), task("c").model_copy(update={"run_id": "other"})
    records = [
        result(second, text="late"),
        result(first, 1, text="one"),
        outcome(first, 1, version=3, reward=0.5),
        result(first, 1, text="again"),
        result(other, text="other"),
        result(first, 0, text="zero"),
    ]
    rows = answer_rows(RUN, records)
    assert [(row["completion"], row["reward"]) for row in rows] == [("late", None), ("zero", None), ("one", 0.5)]
    assert rows[2]["policy"].endswith("@v3") and rows[2]["prompt"][0]["role"] == "user"
    json.dumps(rows)


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LearnedRun]:
    """A finished run whose log has the given records."""

    def made(*records: Record) -> LearnedRun:
        settings = Settings(home=tmp_path)
        monkeypatch.setattr(learned_run, "log_of", nullcontext)
        monkeypatch.setattr(learned_run, "make_codec", lambda _: None)
        monkeypatch.setattr(learned_run, "records_to_end", lambda *_: iter(records))
        return LearnedRun.of_result(RESULT | {"run_id": RUN}, settings)

    return made


def with_columns(task_id: str, **columns: Any) -> Task:
    verifier = Verifier(name="function", data=json.dumps({"columns": columns}))
    return task(task_id, n=1, verifier=verifier)


def test_the_answers_are_a_data_set(run_with: Callable[..., LearnedRun]) -> None:
    first, second = with_columns("a", letter="e", info={"level": 1}), with_columns("b", letter=None, info={})
    run = run_with(result(first), outcome(first, reward=0.5), result(second, text="unknown"))
    found = run.to_dataset()
    assert found.column_names == ["prompt", "completion", "task_id", "sample_index", "columns", *JUDGED]
    assert found["completion"][:] == ["Because they like it.", "unknown"]
    assert found["reward"][:] == [0.5, None] and found["policy"][:] == ["assistant@v1", None]
    assert found[0]["prompt"] == [{"role": "user", "content": "Why do cats purr?"}]
    assert found["columns"][:] == [{"letter": "e", "info": {"level": 1}}, {"letter": None, "info": {"level": None}}]
    assert found["components"][:] == [{"on_topic": 1.0, "words": 10.0}, None]


def test_a_data_set_of_prompts_without_columns_is_written_as_parquet(
    run_with: Callable[..., LearnedRun], tmp_path: Path
) -> None:
    of = with_columns("a")
    run_with(result(of), outcome(of, components={})).to_dataset().to_parquet(str(tmp_path / "rows.parquet"))
    (row,) = read_rows(tmp_path / "rows.parquet")
    assert row.values is not None and (row.values["reward"], row.values["columns"]) == (1.0, None)


def test_a_column_with_values_of_two_types_is_named(run_with: Callable[..., LearnedRun]) -> None:
    one, two = with_columns("a", answer=1), with_columns("b", answer="many")
    with pytest.raises(ValueError, match=r"columns .* of run run-1 have values of different types.*'many'.*rows\(\)"):
        run_with(result(one), result(two)).to_dataset()


def test_without_datasets_the_message_names_it_and_the_way_without(
    run_with: Callable[..., LearnedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"'\.\[datasets\]' in a checkout\. rows\(\) returns the same"):
        run_with().to_dataset()


def test_the_bar_shows_steps_reward_and_remarks(capsys: pytest.CaptureFixture[str]) -> None:
    stats = SimpleNamespace(
        run_id="learn-1",
        acknowledged=3,
        first_version=1,
        step_of=lambda version: version - 1,
        scores=lambda: [SimpleNamespace(version=2, mean=0.25)],
        tokens_per_second=lambda: 40.0,
    )
    now: Any = SimpleNamespace(stats=stats, steps=5, processes={})
    with TrainingBar(True) as bar:
        bar.show(now)
        bar.write("a remark\n")
    shown = capsys.readouterr()
    assert "2/5" in shown.err and "reward v2 0.25, 40 tok/s" in shown.err and "a remark\n" in shown.err
    assert shown.out == ""
    with TrainingBar(False) as bar:
        bar.show(now)
        bar.write("a remark\n")
    hidden = capsys.readouterr()
    assert (hidden.err, hidden.out) == ("a remark\n", "")
