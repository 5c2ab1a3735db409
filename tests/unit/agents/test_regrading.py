"""Recorded episodes are graded again from their results alone, with the checks and tests of today."""

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from schemas.ids import sha256_hex
from schemas.records import Attachment, Ending, Message, Result, Task, ToolCall, Verifier
from tentalis.agents.environments import Environment, EnvironmentOptions, LeftFile
from tentalis.agents.environments.regrading import REGRADERS, CannotRegrade
from tentalis.agents.environments.swe import SweEnvironment
from tentalis.agents.environments.terminal import TerminalEnvironment
from tentalis.agents.sandbox import Wall
from tentalis.storage import objects
from tentalis.storage.attachments import AttachmentStore, read_attachment
from tentalis.storage.errors import StoreUnreachable
from tentalis.storage.location import Location
from tests.support import loop_records
from tests.support.swe_packages import PACKAGES
from tests.support.swe_repositories import write_folder
from tests.unit.agents.test_swe_tasks import block, correction, instance_of

TERMINAL_TASKS = Path(__file__).parents[2] / "support/terminal_tasks"


def asked(environment: str, content: str, data: Mapping[str, Any] | None = None, verifier: str = "episode") -> Task:
    return loop_records.task(
        n=1,
        environment=environment,
        messages=(Message(role="user", content=content),),
        verifier=Verifier(name=verifier, data=json.dumps(data or {})),
    )


def recorded(
    make: Callable[[], Environment], task: Task, turns: Sequence[str], store: AttachmentStore | None = None
) -> Result:
    """The result of an episode with these turns, as the worker records it."""

    async def play() -> Result:
        environment = make()
        calls: list[ToolCall] = []
        files: tuple[LeftFile, ...] = ()
        done = False
        try:
            await environment.reset(task)
            for turn in turns:
                transition = await environment.step(turn)
                calls += transition.tool_calls
                done = transition.done
            rewards = dict(await environment.score())
            calls += environment.ending_calls()  # type: ignore[attr-defined]
            files = environment.left_files()  # type: ignore[attr-defined]
        finally:
            await environment.close()
        ending = Ending.DONE if done else Ending.TURN_LIMIT
        made = loop_records.result(
            task, text=turns[-1], steps=tuple(turns), tool_calls=tuple(calls), rewards=rewards, ending=ending
        )
        if store is None:
            assert files == (), "without a store, an environment prepares no files"
            return made
        stored = [store.put(each.name, each.media_type, each.content) for each in files if each.content is not None]
        return made.model_copy(update={"attachments": tuple(stored)})

    return asyncio.run(play())


def graded_again(grader: tuple[str, str], options: EnvironmentOptions, result: Result) -> dict[str, float]:
    async def grade() -> dict[str, float]:
        return dict(await REGRADERS[grader](options).parts(result))

    return asyncio.run(grade())


def refused(grader: tuple[str, str], options: EnvironmentOptions, result: Result) -> str:
    with pytest.raises(CannotRegrade) as caught:
        graded_again(grader, options, result)
    return str(caught.value)


def no_wall() -> Wall:
    raise AssertionError("an answer needs no wall")


def test_an_answer_is_compared_again() -> None:
    task = asked("toolcall", "What is 6 * 7?", {"answer": "42", "encourage_calls": True})
    options = EnvironmentOptions(no_wall)
    right = loop_records.result(task, text="The answer is 42.", ending=Ending.DONE, rewards={"calls": 1.0})
    grader = ("toolcall", "answer")
    assert graded_again(grader, options, right) == {"calls": 1.0, "refused_calls": 0.0, "answer": 1.0, "reward": 1.0}
    wrong = loop_records.result(task, text="It is 41.", ending=Ending.DONE, rewards={"calls": 3.0})
    assert graded_again(grader, options, wrong)["reward"] == -0.95
    unanswered = loop_records.result(task, text="The answer is 42.", ending=Ending.TURN_LIMIT, rewards={"calls": 3.0})
    assert graded_again(grader, options, unanswered)["reward"] == -0.95, "a turn with a call is not the answer"
    other = loop_records.result(asked("toolcall", "?", {"answer": "42"}, "gsm8k"), ending=Ending.DONE)
    assert "name toolcall/gsm8k" in refused(grader, options, other)


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("swe"))


def changed_tests(folder: Path, into: Path, name: str) -> Path:
    """The same instances, in which the first test to pass of one is one that it cannot pass."""
    shutil.copytree(folder, into, symlinks=True)
    file = into / "instances.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["instance_id"] == name:
            row["FAIL_TO_PASS"] = json.dumps([*json.loads(row["FAIL_TO_PASS"]), "tests/test_other.py::test_other"])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return into


def test_a_recorded_patch_is_tested_again(wall: Wall, instances: Path, tmp_path: Path) -> None:
    """A patch that is longer than its record, and not text in UTF-8, is read from the store of attachments."""
    package, store = PACKAGES[0], AttachmentStore(Location.of_folder(tmp_path / "left"), 1 << 20)
    short = "echo more >notes.txt; rm README; chmod 755 roman.py"
    long = "seq 30000 >numbers.txt; printf 'caf\\351\\n' >latin.txt"
    options = EnvironmentOptions(lambda: wall, tasks=instances, attachment_bytes=store.limit)
    # Without <done>: what is left is recorded all the same.
    turns = [f"{correction(package)}\n" + block(f"{short}; {long}")]
    task = asked("swe", instance_of(package), {"digest": None})
    result = recorded(lambda: SweEnvironment(options), task, turns, store)
    assert result.ending is Ending.TURN_LIMIT and result.rewards["reward"] == 1.0
    (attached,) = result.attachments
    assert (attached.name, attached.media_type) == ("patch.diff", "text/x-diff") and attached.bytes > 128 * 1024
    grader, reader = ("swe", "tests"), EnvironmentOptions(lambda: wall, tasks=instances)
    again = graded_again(grader, reader, result)
    assert again == result.rewards and again["diff_files"] == 5.0

    def altered(*files: Attachment, **fields: object) -> Result:
        patch, tests = (call for call in result.tool_calls if call.name in ("patch", "tests"))
        record = patch.model_copy(update={"result": json.dumps(json.loads(patch.result or "") | fields)})
        return result.model_copy(update={"tool_calls": (record, tests), "attachments": files})

    first, *diffs = read_attachment(attached).split(b"diff --git ")
    kept = [each for each in diffs if b"numbers.txt" not in each[:40] and b"latin.txt" not in each[:40]]
    text = b"diff --git ".join([first, *kept])
    inline = altered(patch=text.decode(), whole=True, sha256=sha256_hex(text))
    changed = EnvironmentOptions(lambda: wall, tasks=changed_tests(instances, tmp_path / "new", instance_of(package)))
    less = graded_again(grader, changed, inline)
    assert (less["reward"], less["diff_files"], less["pass_to_pass"]) == (0.0, 3.0, 1.0)
    assert less["edits"] == 1.0 and 0.0 < less["fail_to_pass"] < 1.0

    assert "only the beginning" in refused(grader, reader, altered())
    assert "only the beginning" in refused(grader, reader, altered(attached.model_copy(update={"url": None})))
    assert "not text in UTF-8" in refused(grader, reader, altered(patch="else", whole=True))
    assert "has no patch" in refused(grader, reader, result.model_copy(update={"tool_calls": ()}))
    gone = attached.model_copy(update={"url": f"{attached.url}x"})
    assert "is missing" in refused(grader, reader, altered(gone))
    other = store.put(attached.name, attached.media_type, b"another patch")
    assert "another one than" in refused(grader, reader, altered(other))


def test_an_attachment_whose_store_is_away_stops_the_grading(
    wall: Wall, instances: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every answer of the run is left out for it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_MAX_ATTEMPTS", "1")):
        monkeypatch.setenv(name, value)
    objects._file_system.cache_clear()
    cut = {"patch": "diff", "whole": False, "sha256": "0" * 64}
    calls = tuple(ToolCall(name=name, result=json.dumps(value)) for name, value in (("patch", cut), ("tests", {})))
    away = Attachment(name="patch.diff", media_type="text/x-diff", sha256="0" * 64, bytes=9, url="s3://bucket/0")
    result = loop_records.result(asked("swe", instance_of(PACKAGES[0])), tool_calls=calls, attachments=(away,))
    options = EnvironmentOptions(lambda: wall, tasks=instances)
    with pytest.raises(StoreUnreachable, match="bucket/0"):
        graded_again(("swe", "tests"), options, result)
    objects._file_system.cache_clear()


def test_outputs_that_the_record_cuts_are_attached_whole(wall: Wall, tmp_path: Path) -> None:
    store = AttachmentStore(Location.of_folder(tmp_path / "left"), 1 << 20)
    tasks = tmp_path / "tasks"
    shutil.copytree(TERMINAL_TASKS, tasks)
    name = sorted(each.name for each in tasks.iterdir())[0]
    script = "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt; seq 5000\n"
    (tasks / name / "tests/test.sh").write_text(script)
    options = EnvironmentOptions(lambda: wall, tasks=tasks, attachment_bytes=store.limit)
    result = recorded(lambda: TerminalEnvironment(options), asked("terminal", name), [block("pwd")], store)
    (output,) = result.attachments
    assert output.name == "checks.out" and read_attachment(output).decode().split() == [str(n) for n in range(1, 5001)]


def test_recorded_commands_are_run_again_before_the_checks(wall: Wall, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(TERMINAL_TASKS, tasks)
    options = EnvironmentOptions(lambda: wall, tasks=tasks)
    name = sorted(each.name for each in tasks.iterdir())[0]
    solve = (tasks / name / "solution/solve.sh").read_text().removeprefix("#!/bin/bash\n")
    turns = [block(part) for part in solve.split("\n\n") if part.strip()]
    result = recorded(lambda: TerminalEnvironment(options), asked("terminal", name), turns)
    assert result.rewards["reward"] == 1.0 and result.tool_calls[-1].name == "checks"
    grader = ("terminal", "checks")
    assert graded_again(grader, options, result) == result.rewards
    # Other checks: the digest that the task names is no longer that of the folder.
    named = result.model_copy(update={"task": asked("terminal", "Do it.", {"task": name, "digest": "0" * 64})})
    (tasks / name / "tests/test.sh").write_text("mkdir -p /logs/verifier; echo 0.25 >/logs/verifier/reward.txt\n")
    assert graded_again(grader, options, named)["reward"] == 0.25
    assert result.rewards["reward"] == 1.0
    # A turn that was cut off was not taken as an action.
    cut_off = result.model_copy(update={"steps": (*turns, block("rm -rf *"))})
    assert "another command than recorded" in refused(grader, options, cut_off)

    timed_out = result.model_copy(update={"ending": Ending.TIMED_OUT})
    assert "stopped with the episode" in refused(grader, options, timed_out)
    random = recorded(lambda: TerminalEnvironment(options), asked("terminal", name), [block("echo $RANDOM$RANDOM")])
    assert "turn 1 gives another output than recorded" in refused(grader, options, random)
