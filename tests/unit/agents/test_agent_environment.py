"""The environment agent: a program behind the wall, its folder, variables and input, and the check of what it left."""

import asyncio
import json
import ssl
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.records import Task, Verifier
from tentalis.agents.environments import EnvironmentFault, EnvironmentOptions, ProgramAccess, ProgramEnd
from tentalis.agents.environments.agent import AgentEnvironment, BadProgram
from tentalis.agents.environments.agent_check import BadCheckReward, reward_of
from tentalis.agents.environments.trial.relay import answer_text
from tentalis.agents.sandbox import CommandEnd, CommandOutput, WallMissing, choose_wall
from tentalis.cli.main import app
from tentalis.rewards.environment_file import BadEnvironmentFile, DeclaredEnvironment, read_environments
from tentalis.rewards.registry import BUILT_IN, ENVIRONMENTS
from tests.support.chat_backend import ChatScript, chat_backend
from tests.support.environment_pages import forget_environments
from tests.support.gateway_lab import listening
from tests.support.loop_records import task

ACCESS = ProgramAccess("http://127.0.0.1:1", "te-key", "assistant")
SHOW = """
    import json, os, sys
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_MODEL", "HOME", "OWN")
    print(json.dumps({"given": json.load(sys.stdin), "words": sys.argv[1:], "cwd": os.getcwd()}
                     | {name: os.environ.get(name) for name in names}))
"""


def declared(folder: Path, program: Mapping[str, Any], **scripts: str) -> DeclaredEnvironment:
    """An environment `own` in a file of the folder, with programs beside it in `agent/` and checks in the folder."""
    (folder / "agent").mkdir(parents=True, exist_ok=True)
    for name, text in scripts.items():
        place = folder / ("agent" if name.startswith("agent") else ".") / f"{name}.py"
        place.write_text(textwrap.dedent(text), encoding="utf-8")
    file = folder / "environments.yaml"
    file.write_text(json.dumps({"environments": {"own": {"base": "agent", "program": program}}}), encoding="utf-8")
    return read_environments(file, ENVIRONMENTS, BUILT_IN)["own"]


def made(found: DeclaredEnvironment) -> AgentEnvironment:
    try:
        return AgentEnvironment(EnvironmentOptions(choose_wall, declared=found))
    except WallMissing as error:
        pytest.skip(str(error))


def asked(question: str = "A question?", **data: Any) -> Task:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    return task("t", environment="own", messages=messages, verifier=Verifier(name="episode", data=json.dumps(data)))


def played(found: DeclaredEnvironment, of: Task) -> tuple[ProgramEnd, Mapping[str, float], dict[str, Any]]:
    """The end of the program, the score, and the records of program and check."""

    async def play() -> tuple[ProgramEnd, Mapping[str, float], dict[str, Any]]:
        environment = made(found)
        try:
            await environment.reset(of)
            end = await environment.run_program(ACCESS)
            score = await environment.score()
            calls = {call.name: json.loads(call.result or "{}") for call in environment.ending_calls()}
            return end, score, calls
        finally:
            await environment.close()

    return asyncio.run(play())


def test_a_program_gets_the_task_the_model_and_a_folder_of_its_own(tmp_path: Path) -> None:
    command = ["{python}", "{folder}/agent/agent_show.py", "--task", "{prompt}", "{model}", "{other}"]
    program = {"command": command, "readable": ["agent"], "variables": {"OWN": "of {model}"}}
    end, score, calls = played(declared(tmp_path, program, agent_show=SHOW), asked("What is {model}?", answer="secret"))
    assert end == ProgramEnd(0, False, end.said) and score == {"exit_code": 0.0}
    shown = json.loads(calls["program"]["output"])
    assert shown["words"] == ["--task", "What is {model}?", "assistant", "{other}"]
    assert shown["given"]["prompt"] == "What is {model}?" and len(shown["given"]["messages"]) == 2
    assert "secret" not in calls["program"]["output"], "the data are for the check alone"
    assert (shown["OPENAI_BASE_URL"], shown["ANTHROPIC_BASE_URL"]) == ("http://127.0.0.1:1/v1", "http://127.0.0.1:1")
    assert (shown["OPENAI_API_KEY"], shown["OPENAI_MODEL"], shown["OWN"]) == ("te-key", "assistant", "of assistant")
    assert shown["cwd"] == "/workspace" and not Path(shown["HOME"]).exists()


def test_a_program_may_read_the_certificates_of_authorities(tmp_path: Path) -> None:
    """HTTP clients read them when they begin, and end if they may not."""
    loads = "import ssl; ssl.create_default_context(cafile=ssl.get_default_verify_paths().openssl_cafile)"
    if not Path(ssl.get_default_verify_paths().openssl_cafile).is_file():
        pytest.skip("this machine has no file of certificates where OpenSSL looks for one")
    end, _, _ = played(declared(tmp_path, {"command": ["{python}", "-c", loads]}), asked())
    assert end == ProgramEnd(0, False, "")


def test_the_check_scores_the_files_of_the_program_which_cannot_read_it(tmp_path: Path) -> None:
    writes = """
        import pathlib, sys
        pathlib.Path("given.txt").write_text(pathlib.Path("given.txt").read_text() + " and more")
        pathlib.Path("json.py").write_text("raise SystemExit(0)")
        for path in ("check.py", "environments.yaml"):
            try:
                print(pathlib.Path(sys.argv[1], path).read_text())
            except OSError as error:
                print(type(error).__name__)
    """
    check = """
        import json, pathlib, sys
        episode = json.load(sys.stdin)
        text = pathlib.Path(episode["workspace"], "given.txt").read_text()
        print("checked")
        print(json.dumps({"reward": 0.25, "right": text == episode["data"]["text"], "tried": 2}))
    """
    (tmp_path / "tasks/one").mkdir(parents=True)
    (tmp_path / "tasks/one/given.txt").write_text("some")
    program = {
        "command": ["{python}", "{folder}/agent/agent_writes.py", "{folder}"],
        "readable": ["agent"],
        "workspace": "tasks",
        "check": ["{python}", "{folder}/check.py"],
    }
    found = declared(tmp_path, program, agent_writes=writes, check=check)
    _, score, calls = played(found, asked(workspace="one", text="some and more"))
    assert score == {"exit_code": 0.0, "reward": 0.25, "check.tried": 2.0}
    assert calls["program"]["output"].split() == ["PermissionError"] * 2
    assert (tmp_path / "tasks/one/given.txt").read_text() == "some"
    with pytest.raises(EnvironmentFault, match=r"no workspace \.\./agent"):
        played(found, asked(workspace="../agent"))


def test_a_program_that_fails_is_scored_and_one_that_cannot_start_is_a_fault(tmp_path: Path) -> None:
    failing = {"command": ["/bin/sh", "-c", "echo why >&2; exit 3"], "check": ["/bin/true"]}
    end, score, _ = played(declared(tmp_path, failing), asked())
    assert end == ProgramEnd(3, False, "why") and score == {"exit_code": 3.0, "reward": 1.0}
    with pytest.raises(EnvironmentFault, match="no-such-program could not be started"):
        played(declared(tmp_path, {"command": ["no-such-program"]}), asked())
    slow = {"command": ["/bin/sh", "-c", "sleep 60"], "seconds": 1, "check": ["/bin/false"]}
    end, score, _ = played(declared(tmp_path, slow), asked())
    assert end == ProgramEnd(None, True, "") and score == {"reward": 0.0}


def test_a_program_that_could_read_its_check_is_refused(tmp_path: Path) -> None:
    program = {"command": ["/bin/true"], "readable": ["."], "check": ["{python}", "{folder}/check.py"]}
    with pytest.raises(BadProgram, match=r"may read .*move it"):
        made(declared(tmp_path, program))
    with pytest.raises(BadProgram, match=r"there is no .*missing"):
        made(declared(tmp_path, {"command": ["/bin/true"], "readable": ["missing"]}))
    with pytest.raises(BadProgram, match="needs a file of environments"):
        AgentEnvironment(EnvironmentOptions(choose_wall))


@pytest.mark.parametrize(
    "entry, says",
    [
        ({"base": "agent"}, "agent needs the program that plays"),
        ({"base": "echo", "program": {"command": ["x"]}}, "echo takes no program, as agent does"),
        ({"base": "agent", "program": {"command": []}}, "program.command"),
        ({"base": "agent", "program": {"command": ["x"], "chek": ["y"]}}, "chek: no such key, did you mean check"),
        ({"base": "agent", "program": {"command": ["x"], "network": ["example.org"]}}, "program.network"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    file = tmp_path / "environments.yaml"
    file.write_text(json.dumps({"environments": {"own": entry}}))
    with pytest.raises(BadEnvironmentFile, match=says):
        read_environments(file, ENVIRONMENTS, BUILT_IN)


def ended(stdout: str = "", code: int | None = 0, end: CommandEnd = CommandEnd.EXITED) -> CommandOutput:
    return CommandOutput(stdout.encode(), b"", end, code)


@pytest.mark.parametrize(
    "output, reward, parts",
    [
        (ended(), 1.0, {}),
        (ended(code=1), 0.0, {}),
        (ended("fine"), 1.0, {}),
        (ended('noise\n{"reward": -0.5, "tests": 3, "yes": true, "word": "x"}\n'), -0.5, {"check.tests": 3.0}),
        (ended('{"tests": 3}'), 1.0, {"check.tests": 3.0}),
        (ended('{"reward": 1}', code=2), 0.0, {"check.reward": 1.0}),
        (ended(code=None, end=CommandEnd.TIMED_OUT), 0.0, {"check_stopped": 1.0}),
    ],
)
def test_the_reward_of_a_check(output: CommandOutput, reward: float, parts: dict[str, float]) -> None:
    assert reward_of(output) == (reward, parts)


def test_a_reward_outside_of_its_range_is_a_fault() -> None:
    with pytest.raises(BadCheckReward, match="the reward 2, outside"):
        reward_of(ended('{"reward": 2}'))


CALLS = """
    import json, os, pathlib, sys, urllib.error, urllib.request

    def ask(text, stream=False):
        body = {"model": "gpt-4o", "stream": stream, "messages": [{"role": "user", "content": text}]}
        where = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(where, json.dumps(body).encode())) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    prompt = json.load(sys.stdin)["prompt"]
    try:
        for turn in range(int(sys.argv[1])):
            pathlib.Path("answer.txt").write_text(ask(f"{prompt} ({turn})"))
    except urllib.error.HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])
"""
RIGHT = """
    import json, pathlib, sys
    given = json.load(sys.stdin)
    answer = pathlib.Path(given["workspace"], "answer.txt").read_text()
    print(json.dumps({"reward": float(answer == given["data"]["answer"])}))
"""


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[DeclaredEnvironment]:
    program = {
        "command": ["{python}", "{folder}/agent/agent_calls.py", "2"],
        "readable": ["agent"],
        "check": ["{python}", "{folder}/right.py"],
    }
    found = declared(tmp_path, program, agent_calls=CALLS, right=RIGHT)
    asyncio.run(made(found).close())
    yield found
    forget_environments()


def test_env_show_names_the_program_and_the_wall(counting: DeclaredEnvironment) -> None:
    shown = CliRunner().invoke(app, ["env", "show", "own", "Count.", "--file", str(counting.file)])
    assert shown.exit_code == 0, shown.output
    assert "agent_calls.py" in shown.stdout and "wall: sandlock/" in shown.stdout and "[user]\nCount." in shown.stdout


def test_env_try_plays_a_program_with_a_model_server(counting: DeclaredEnvironment) -> None:
    script = ChatScript(lambda messages: messages[-1]["content"][-2:-1] + "!")
    words = ["env", "try", "own", "Count.", "--file", str(counting.file), "--data", '{"answer": "1!"}']
    with listening(chat_backend(script)) as backend:
        played = CliRunner().invoke(app, [*words, "--server", backend])
        bounded = CliRunner().invoke(app, [*words, "--server", backend, "--max-turns", "1"])
    assert played.exit_code == 0, played.output
    assert "[user]\nCount. (1)\n\n[turn 2]\n1!" in played.stdout and "exit code 0" in played.stdout
    assert "reward 1" in played.stdout and [each["model"] for each in script.bodies] == ["base"] * 3
    assert "exit code 1" in bounded.stdout and "the 1 turns of this episode are used up" in bounded.stdout
    assert "reward 0" in bounded.stdout
    by_hand = CliRunner().invoke(app, words)
    assert by_hand.exit_code != 0 and "--server URL" in by_hand.output


def test_the_text_of_an_answer_is_shown_also_if_it_was_streamed() -> None:
    parts = [json.dumps({"choices": [{"delta": {"content": each}}]}) for each in "ab"]
    streamed = "".join(f"data: {each}\n\n" for each in [*parts, "[DONE]"])
    assert answer_text(streamed.encode()) == "ab"
    call = {"function": {"name": "f"}}
    message = {"choices": [{"message": {"content": None, "tool_calls": [call]}}]}
    assert json.loads(answer_text(json.dumps(message).encode())) == call
    for other in (b"[]", b'{"choices": [1]}', b"\xff", b"null"):
        assert answer_text(other) == other.decode(errors="replace")
