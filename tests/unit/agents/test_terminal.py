"""The environment terminal: the shell, turns, names of folders, task folders, limits, and an episode of a worker."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.records import Ending, Message, Status, Task, Verifier
from tentalis.agents.environments import EnvironmentFault, EnvironmentOptions, Transition
from tentalis.agents.environments.agent_repositories import disarm
from tentalis.agents.environments.dockerfile import (
    LONGEST_TEXT,
    LONGEST_VARIABLES,
    MOST_VARIABLES,
    CopiedFiles,
    SetupCommand,
    installation,
    parsed_dockerfile,
)
from tentalis.agents.environments.registry import default_turns, has_episodes, maker_of, prepared_environment
from tentalis.agents.environments.shown_paths import ShownPaths
from tentalis.agents.environments.terminal import SHOWN_CHARACTERS, TerminalEnvironment
from tentalis.agents.environments.terminal_task import BadTasks, TaskRefused, load_task, task_digest
from tentalis.agents.environments.terminal_turns import LONGEST_COMMAND, NO_COMMAND, parsed_turn
from tentalis.agents.sandbox import Wall, choose_wall
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.cli.main import app
from tentalis.policies.served import ServedVersions
from tentalis.rewards.registry import verify
from tests.support.episode_server import EpisodeServer
from tests.support.loop_records import T0, ack, task
from tests.support.transitions import with_ending
from tests.support.worker_lab import policy_calls

TASKS = Path(__file__).parents[2] / "support/terminal_tasks"


def harbor_task(folder: Path, test: str = "echo 1 >/logs/verifier/reward.txt", **files: str) -> Path:
    """Makes a folder of tasks with the task `t`; `files`: further files, `__` for `/` and `_` for `.`."""
    made = folder / "t"
    contents = {"task_toml": "", "instruction_md": "Do it in /app.", "tests__test_sh": test, **files}
    for name, text in contents.items():
        path = made / "/".join(part.replace("_", ".") for part in name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (made / "environment").mkdir(exist_ok=True)
    return folder


def of_folder(name: str = "t", **data: Any) -> Task:
    verifier = Verifier(name="episode", data=json.dumps(data))
    return task(environment="terminal", n=1, messages=[{"role": "user", "content": name}], verifier=verifier)


def played(wall: Wall, tasks: Path, *turns: str, of: Task | None = None) -> tuple[list[Transition], dict[str, float]]:
    """Plays turns; each is a command unless it has a block or `<done>`."""

    async def play() -> tuple[list[Transition], dict[str, float]]:
        made = TerminalEnvironment(EnvironmentOptions(lambda: wall, tasks=tasks))
        try:
            await made.reset(of or of_folder())
            sent = (turn if "```" in turn or "<" in turn else f"```bash\n{turn}\n```" for turn in turns)
            transitions = [await made.step(turn) for turn in sent]
            score = dict(await made.score())
            return with_ending(transitions, made), score
        finally:
            await made.close()

    return asyncio.run(play())


def said(transition: Transition) -> str:
    return "".join(message.content for message in transition.observation.messages)


def test_the_shells_state_lives_between_commands(wall: Wall, tmp_path: Path) -> None:
    commands = [
        "mkdir -p 'a b'; cd 'a b'; x=$'two\nlines \"$y\"'; export Y='z z'; list=(1 '2 3'); declare -A map=([k]=v)",
        'pwd; echo "$x"; sh -c \'echo $Y\'; echo "${list[1]} ${map[k]}"',
        "greet() { echo \"hello $1\"; }; alias hi='greet you'; umask 077; set -o pipefail; shopt -s nullglob; IFS=:",
        'hi; umask; false | true; echo $?; echo *.none; x="a:b"; for each in $x; do echo $each; done',
        "unset Y; set -u; readonly R=1",
        "echo ${Y-unset} $R; echo $nothing",
        "set +u; cd ..; exit 3",
        "trap 'echo bye' EXIT; cd /tmp; z=1",
        "pwd; echo $z; cd /nowhere",
    ]
    transitions, score = played(wall, harbor_task(tmp_path), *commands)
    seen = [said(each) for each in transitions]
    assert seen[0] == "[no output]"
    assert seen[1] == '/app/a b\ntwo\nlines "$y"\nz z\n2 3 v'
    assert seen[3] == "hello you\n0077\n1\n\na\nb"
    assert "unset 1" in seen[5] and "nothing: unbound variable" in seen[5]
    assert seen[6] == "[exit code 3]"
    assert seen[8].startswith("/tmp\n1\n") and seen[8].endswith("[exit code 1]")
    assert score["commands"] == len(commands)


def test_a_shell_that_is_ruined_or_stopped_goes_on(wall: Wall, tmp_path: Path) -> None:
    tasks = harbor_task(tmp_path, task_toml="[tentalis]\ncommand_s = 4.0\n")
    transitions, _ = played(
        wall,
        tasks,
        "cd /tmp; x=kept",
        "x=lost; sleep 60",
        "echo $x $PWD; kill -9 $$",
        "exec sh -c 'echo replaced'",
        "set -n",
        "echo $x; (",
        "sleep 60 & echo $!",
        "kill -0 $! 2>/dev/null || echo gone; head -c 300000 /dev/zero | tr '\\0' x",
        "rm -rf ../../state; echo $x",
        "echo alive",
    )
    seen = [said(each) for each in transitions]
    assert seen[1] == "[stopped: the time limit was reached] [a command has 4 s]"
    assert seen[2].startswith("kept /tmp") and "killed" in seen[2]
    assert seen[3] == "replaced"
    assert seen[5].startswith("kept") or "syntax error" in seen[5]
    assert seen[7].startswith("gone\nxxx") and len(seen[7]) < SHOWN_CHARACTERS + 200
    assert seen[9] == "alive"


def test_a_trajectory_is_recorded(wall: Wall, tmp_path: Path) -> None:
    tasks = harbor_task(tmp_path, test="echo checking; echo 0.5 >/logs/verifier/reward.txt")
    transitions, score = played(wall, tasks, "pwd; echo bad >&2; false", "<done>")
    named, command, *rest = transitions[0].tool_calls
    assert json.loads(named.arguments) == {"task": "t", "digest": task_digest(tmp_path / "t")}
    assert (command.name, json.loads(command.arguments)) == ("bash", {"command": "pwd; echo bad >&2; false"})
    assert json.loads(command.result or "") == {
        "output": "/app\n",
        "error": "bad\n",
        "exit_code": 1,
        "ending": "exit code 1",
    }
    assert not rest
    (checks,) = transitions[1].tool_calls
    assert json.loads(checks.result or "")["reward"] == 0.5 == score["reward"]
    assert json.loads(checks.result or "")["output"] == "checking\n"


def test_steps_and_seconds_end_an_episode(wall: Wall, tmp_path: Path) -> None:
    tasks = harbor_task(tmp_path, task_toml="[tentalis]\nsteps = 2\n")
    transitions, score = played(wall, tasks, "ls", "nothing to run: <nothing>")
    assert [each.done for each in transitions] == [False, True]
    assert (score["reward"], score["bad_turns"]) == (1.0, 1.0)
    tasks = harbor_task(tmp_path, task_toml="[agent]\ntimeout_sec = 0.05\n")
    assert played(wall, tasks, "sleep 0.1")[0][0].done


@pytest.mark.parametrize(
    ("test", "reward", "parts"),
    [
        ("echo 1 >/logs/verifier/reward.txt", 1.0, {}),
        ('echo \'{"reward": -0.5, "style": 0.25, "x": "y"}\' >/logs/verifier/reward.json', -0.5, {"check.style": 0.25}),
        (
            "echo '{\"style\": 0.25}' >/logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt",
            1.0,
            {"check.style": 0.25},
        ),
        ("exit 0", 0.0, {"no_reward": 1.0}),
        ("echo nan >/logs/verifier/reward.txt", 0.0, {"no_reward": 1.0}),
        ("ln -s /app/mine /logs/verifier/reward.txt", 0.0, {"no_reward": 1.0}),
        ("sleep 60", 0.0, {"checks_stopped": 1.0}),
    ],
)
def test_rewards_of_checks(wall: Wall, tmp_path: Path, test: str, reward: float, parts: dict[str, float]) -> None:
    limit = "[verifier]\ntimeout_sec = 2.0\n" if "sleep" in test else ""
    tasks = harbor_task(tmp_path, test=test, task_toml=limit)
    _, score = played(wall, tasks, "echo 1 >mine", "<done>")
    assert score == {**parts, "reward": reward, "commands": 1.0, "bad_turns": 0.0}


def test_a_reward_out_of_range_is_a_fault_of_the_task(wall: Wall, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"reward 7\.0, outside"):
        played(wall, harbor_task(tmp_path, test="echo 7 >/logs/verifier/reward.txt"), "<done>")


def test_checks_see_names_of_a_container_and_a_clean_place(wall: Wall, tmp_path: Path) -> None:
    test = """cat /app/x "/tests/data.txt" >/logs/verifier/seen; cd /app
python3 -c 'import json; print(json.__file__)' && python3 /tests/t.py && [ "$PWD" = /app ] &&
  [ "$K" = /app/k ] && [ -z "$(ls -A "$HOME")$(ls -A "$TMPDIR")" ] && echo 1 >/logs/verifier/reward.txt"""
    tasks = harbor_task(
        tmp_path,
        test=test,
        task_toml='[verifier.env]\nK = "/app/k"\n',
        tests__data_txt="data",
        tests__t_py="print(open('/app/x').read())",
    )
    command = (
        "echo 'raise SystemExit(1)' >json.py; echo 'raise SystemExit(1)' >sitecustomize.py; echo /app >x; touch ~/y"
    )
    transitions, score = played(wall, tasks, command, "<done>")
    assert score["reward"] == 1.0, transitions[1].tool_calls


def test_a_terminal_bench_folder_is_played_as_it_is(wall: Wall, tmp_path: Path) -> None:
    made = tmp_path / "t"
    (made / "tests").mkdir(parents=True)
    (made / "task.yaml").write_text(
        "instruction: |-\n  Write hello to /app/hello.txt.\ndifficulty: easy\nparser_name: pytest\n"
    )
    (made / "Dockerfile").write_text(
        "FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624\nWORKDIR /app\nCOPY . .\n"
    )
    (made / "docker-compose.yaml").write_text("services:\n  client:\n    image: x\n")
    (made / "run-tests.sh").write_text('#!/bin/bash\npython3 "$TEST_DIR/test_outputs.py"\n')
    (made / "tests/test_outputs.py").write_text('assert open("/app/hello.txt").read() == "hello\\n"\n')
    (made / "solution.sh").write_text("secret\n")
    (made / "given.txt").write_text("given\n")
    transitions, score = played(wall, tmp_path, "ls -A", "echo hello >/app/hello.txt", "<done>")
    assert said(transitions[0]) == "given.txt" and score["reward"] == 1.0
    assert played(wall, tmp_path, "<done>")[1]["reward"] == 0.0


def test_a_changed_task_is_noticed(wall: Wall, tmp_path: Path) -> None:
    tasks = harbor_task(tmp_path)
    digest = task_digest(tmp_path / "t")
    assert played(wall, tasks, "<done>", of=of_folder("Begin.", task="t", digest=digest))[1]["reward"] == 1.0
    (tmp_path / "t/tests/test.sh").chmod(0o755)
    assert task_digest(tmp_path / "t") != digest
    with pytest.raises(EnvironmentFault, match=f"has changed.*{digest}"):
        played(wall, tasks, "<done>", of=of_folder(digest=digest))


@pytest.mark.parametrize(
    ("files", "needs"),
    [
        ({"environment__Dockerfile": "FROM nvidia/cuda:12\n"}, "the image nvidia/cuda:12"),
        (
            {"environment__Dockerfile": "FROM ubuntu\nRUN apt-get update && apt-get install -y nope-a nope-b\n"},
            "nope-a nope-b",
        ),
        (
            {"environment__Dockerfile": "FROM python:3.13\nRUN pip install numpy==2 && echo ok\n"},
            "RUN pip install numpy==2",
        ),
        ({"environment__Dockerfile": "FROM ubuntu AS a\nFROM ubuntu\nCOPY --from=a /x /app/x\n"}, "several stages"),
        ({"environment__Dockerfile": "FROM ubuntu\nWORKDIR /etc/x\n"}, "the folder /etc/x"),
        ({"environment__Dockerfile": "FROM ubuntu\n"}, "the folder /"),
        ({"environment__Dockerfile": "FROM ubuntu\nWORKDIR /app\nUSER me\n"}, "USER me"),
        ({"environment__docker-compose_yaml": "services: {}\n"}, "services"),
        ({"task_toml": "[environment]\ngpus = 1\n"}, "GPUs"),
        ({"task_toml": "[environment]\nallowed_hosts = ['a.b']\n"}, "the network"),
        ({"task_toml": "[environment]\nmemory_mb = 1\n"}, "memory_mb"),
        ({"task_toml": "[tentalis]\nstep = 1\n"}, "tentalis.step"),
        ({"task_toml": "[["}, "cannot be read"),
        (
            {"task_toml": "a = " + "[" * 100_000},
            r"the task t cannot be read: .*/t/task\.toml: not TOML: nested too deeply$",
        ),
        ({"tests__test_sh": "#!/bin/bash\napt-get install -y curl\n"}, r"test\.sh, line 2: apt-get install -y curl"),
        ({"tests__test_sh": "uvx -w pytest pytest /tests\n"}, "line 1: uvx"),
    ],
)
def test_a_task_that_needs_a_container_is_refused_with_what_it_needs(
    tmp_path: Path, files: dict[str, str], needs: str
) -> None:
    tasks = harbor_task(tmp_path, **files)
    with pytest.raises(TaskRefused, match=needs):
        load_task(tasks, "t")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("task.yaml", "instruction: " + "[" * 100_000, r"task\.yaml: not YAML: nested more deeply than 100 levels"),
        ("task.yaml", "instruction: 2024-13-45", r"task\.yaml: not YAML: no valid timestamp"),
        ("task.yaml", "- a", r"task\.yaml: expected a mapping with the task"),
        ("docker-compose.yaml", "[a]", r"docker-compose\.yaml: expected a mapping with services"),
        ("docker-compose.yaml", "services: 5", r"docker-compose\.yaml: services: expected a mapping, not int"),
        ("docker-compose.yaml", "services: [" + "[" * 100_000, r"docker-compose\.yaml: not YAML: nested more deeply"),
    ],
)
def test_a_terminal_bench_file_that_cannot_be_read_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    tasks = harbor_task(tmp_path, task_yaml="instruction: Do it.")
    (tasks / "t/task.toml").unlink()
    (tasks / "t" / file).write_text(text)
    with pytest.raises(TaskRefused, match=rf"^the task t cannot be read: .*{said}"):
        load_task(tasks, "t")


@pytest.mark.parametrize("text", ["services:\n", "# none\n"])
def test_a_compose_file_without_services_needs_none(tmp_path: Path, text: str) -> None:
    tasks = harbor_task(tmp_path, task_yaml="instruction: Do it.")
    (tasks / "t/task.toml").unlink()
    (tasks / "t/run-tests.sh").write_text("true")
    (tasks / "t/docker-compose.yaml").write_text(text)
    assert load_task(tasks, "t").instruction == "Do it."


def test_names_of_other_folders_are_refused(tmp_path: Path) -> None:
    tasks = harbor_task(tmp_path / "tasks")
    shutil.copytree(tasks / "t", tmp_path / "outside")
    for name in ("../outside", "outside", "", ".", str(tmp_path / "outside")):
        with pytest.raises(TaskRefused, match="no task"):
            load_task(tasks, name)


def test_a_dockerfile_is_read_as_far_as_it_needs_no_container() -> None:
    text = """# comment
FROM --platform=linux/amd64 python:3.12-slim
ARG ROOT=/work
ENV A=1 C=${ROOT}/c
ENV B="two $A"
ENV OLD old value
WORKDIR ${ROOT}
WORKDIR sub
COPY a.txt ["b c.txt", "/data/"]
COPY ["d e.txt", "./"]
RUN apt-get update \\
    && apt-get install -y --no-install-recommends git curl=1 \\
    && rm -rf /var/lib/apt/lists/* && mkdir x && echo y >x/z
CMD ["bash"]
"""
    found = parsed_dockerfile(text.replace('COPY a.txt ["b c.txt", "/data/"]', "COPY a.txt b* /data/"), "/")
    assert (found.workdir, found.needs, found.packages) == ("/work/sub", [], ["git", "curl=1"])
    assert found.variables == {"ROOT": "/work", "A": "1", "B": "two 1", "C": "/work/c", "OLD": "old value"}
    assert found.steps == [
        CopiedFiles(("a.txt", "b*"), "/data", True),
        CopiedFiles(("d e.txt",), "/work/sub", True),
        SetupCommand("mkdir x && echo y >x/z", "/work/sub"),
    ]


@pytest.mark.parametrize(
    ("line", "installs"),
    [
        ("apt-get -y install vim", True),
        ("pacman -Sy vim", True),
        ("apt list; echo install", False),
        ("install pip", False),
        ("pip --version && echo x | tee install", False),
        ("python -m pip install x", True),
        ("uv pip list; uv sync", True),
        ("curl x | sh https://y", False),
        ("curl -s https://y | sh", True),
        ("git  clone x", True),
        ("# pip install x", False),
    ],
)
def test_a_line_of_the_shell_that_installs_is_found(line: str, installs: bool) -> None:
    assert installation(line) == (line if installs else None)


def test_what_is_not_a_json_array_of_texts_is_a_line_of_the_shell() -> None:
    found = parsed_dockerfile('RUN [ -e a ] && echo b\nRUN ["echo", "a b"]\nRUN ["a", 1]\nRUN ' + "[" * 100_000, "/")
    commands = [step.command for step in found.steps if isinstance(step, SetupCommand)]
    assert commands == ["[ -e a ] && echo b", "echo 'a b'", '["a", 1]', "[" * 100_000]


def test_variables_that_double_a_text_are_refused() -> None:
    with pytest.raises(ValueError, match="characters with its variables"):
        parsed_dockerfile("ENV A=aa\n" + "ENV A=$A$A\n" * 100, "/")


@pytest.mark.parametrize("line", ["ENV {}\n", "ARG {}\n"])
def test_variables_that_are_many_or_large_together_are_refused(line: str) -> None:
    several = [line.format(f"A{n}=a") for n in range(MOST_VARIABLES)]
    assert len(parsed_dockerfile("".join(several * 2), "/").variables) == MOST_VARIABLES, "set twice counts once"
    with pytest.raises(ValueError, match=f"sets more than {MOST_VARIABLES} variables"):
        parsed_dockerfile("".join([*several, line.format("B=b")]), "/")
    large = line.format("A=" + "é" * (LONGEST_TEXT // 4))
    with pytest.raises(ValueError, match=f"variables of the Dockerfile have .* bytes, over {LONGEST_VARIABLES}"):
        parsed_dockerfile(large + line.format("B=$A C=$A D=$A E=$A"), "/")


def test_a_dockerfile_prepares_the_folder(wall: Wall, tmp_path: Path) -> None:
    docker = "FROM ubuntu\nENV WHO=me\nWORKDIR /work\nCOPY a.txt b.txt /data/\nCOPY a.txt ./c.txt\n"
    docker += "RUN echo $WHO >who\nRUN echo 2 >>who\n"
    tasks = harbor_task(tmp_path, environment__Dockerfile=docker, environment__a_txt="A", environment__b_txt="B")
    transitions, _ = played(wall, tasks, "pwd; cat /data/a.txt /data/b.txt c.txt who; echo $WHO")
    assert said(transitions[0]) == "/work\nABAme\n2\nme"
    (tmp_path / "t/environment/Dockerfile").write_text("FROM ubuntu\nWORKDIR /app\nRUN echo why >&2; exit 4\n")
    with pytest.raises(EnvironmentFault, match=r"(?s)Dockerfile failed.*why.*exit code 4"):
        played(wall, tasks, "ls")


@pytest.mark.parametrize(
    ("text", "command", "done"),
    [
        ("I look.\n```bash\nls -la\n```\n", "ls -la", False),
        ("```sh\ncat <<X\n```x\nX\n```\n", "cat <<X\n```x\nX", False),
        ("```\nls\n```", "ls", False),
        ("```bash\nls", "ls", False),
        ("<command>ls</command>", "ls", False),
        ("<command>ls", "ls", False),
        ("Finished. <done>", None, True),
        ("```bash\nls\n```\n<done>", "ls", True),
        ("```bash\necho '<done>'\n```", "echo '<done>'", False),
        ("<think>I could write <done> or\n```bash\nrm x\n```\n</think>\n```bash\nls\n```", "ls", False),
        ("```python\nprint(1)\n```", None, False),
        ("```bash\n\n```", None, False),
        ("", None, False),
    ],
)
def test_the_command_of_a_turn(text: str, command: str | None, done: bool) -> None:
    found = parsed_turn(text)
    assert (found.command, found.done) == (command, done)
    assert found.problem == (NO_COMMAND if command is None and not done else None)


def test_only_the_first_command_of_a_turn_is_run(wall: Wall, tmp_path: Path) -> None:
    turn = "```bash\necho one\n```\n```bash\necho two\n```\n<done>"
    transitions, score = played(wall, harbor_task(tmp_path), turn)
    assert said(transitions[0]) == "one\n[only the first command of a turn is run; 1 not run]"
    assert not transitions[0].done and score["commands"] == 1.0
    assert "at most" in (parsed_turn(f"```bash\n{'x' * LONGEST_COMMAND}x\n```").problem or "")
    assert "zero byte" in (parsed_turn("```bash\nx\0\n```").problem or "")


def test_names_of_folders_are_replaced_where_they_stand_for_themselves() -> None:
    paths = ShownPaths({"/app": Path("/x/e/app"), "/tmp": Path("/x/e/tmp")})
    assert paths.real("cd /app; ls /app/a '/app' x=/app:/tmp >/tmp/y") == (
        "cd /x/e/app; ls /x/e/app/a '/x/e/app' x=/x/e/app:/x/e/tmp >/x/e/tmp/y"
    )
    for kept in ("/apple", "./app", "a/app", "$HOME/app", "${X}/app", "/app-1", "/app.d/x", "~/tmp", "//app"):
        assert paths.real(kept) == kept
    assert paths.real("It is in /app.") == "It is in /x/e/app."
    assert paths.shown("/x/e/app/a /x/e/application /x/e/tmp") == "/app/a /x/e/application /tmp"
    assert ShownPaths({}).real("/app") == "/app"
    with pytest.raises(KeyError):
        paths.path("/apple")


def test_the_prompt_has_rules_instruction_and_folder(wall: Wall, tmp_path: Path) -> None:
    async def begun(of: Task) -> list[Message]:
        made = TerminalEnvironment(EnvironmentOptions(lambda: wall, tasks=harbor_task(tmp_path)))
        try:
            return list((await made.reset(of)).messages)
        finally:
            await made.close()

    system, user = asyncio.run(begun(of_folder()))
    assert system.content.startswith("You work in a terminal.") and "```bash" in system.content
    assert user.content == "Do it in /app.\n\nYour folder is /app."
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="A hint."))
    of = of_folder(task="t").model_copy(update={"messages": messages})
    system, hint, user = asyncio.run(begun(of))
    assert system.content.startswith("Be brief.\n\nYou work") and hint.content == "A hint."


def test_a_folder_of_tasks_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    for folder, reason in ((None, "--tasks FOLDER"), (tmp_path / "none", "cannot be read"), (tmp_path, "has no task")):
        with pytest.raises(BadTasks, match=reason):
            TerminalEnvironment(EnvironmentOptions(lambda: choose_wall(allow_unsandboxed=True), tasks=folder))


def test_tasks_that_commands_could_read_are_refused(
    monkeypatch: pytest.MonkeyPatch, wall: Wall, tmp_path: Path
) -> None:
    monkeypatch.setattr(wall, "readable", [*wall.readable, tmp_path])
    with pytest.raises(BadTasks, match="may read"):
        TerminalEnvironment(EnvironmentOptions(lambda: wall, tasks=harbor_task(tmp_path / "tasks")))
    monkeypatch.setattr("tentalis.agents.sandbox.choose.WALLS", {})
    unconfined = choose_wall(allow_unsandboxed=True)
    with pytest.raises(BadTasks, match="without a wall there is no place"):
        TerminalEnvironment(EnvironmentOptions(lambda: unconfined, tasks=harbor_task(tmp_path / "tasks")))


def test_nothing_of_an_episode_is_left(wall: Wall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = harbor_task(tmp_path / "tasks")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    played(wall, tasks, "mkdir d; touch d/x; chmod 0 d; chmod 0 .", "<done>")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_agent_cannot_make_a_fault_of_its_failure(wall: Wall, tmp_path: Path) -> None:
    """A fault has no reward, so an agent would prefer it to a bad one."""
    tasks = harbor_task(tmp_path, test="echo 0 >/logs/verifier/reward.txt")
    ruins = [
        "name=$(printf 'd%.0s' {1..200}); for each in {1..40}; do mkdir $name && cd $name && ln -s / x; done",
        "mkdir locked; ln -s / locked/x; ln -s loop loop; chmod 500 locked .",
        "rm -rf /app ../app; ln -s /nowhere ../app; chmod 0 .. ../../state",
    ]
    ruins += ["echo " + "/app " * 12_000, "echo \ud800", "exec /nowhere", "x=$(yes | head -c 3000000); export x; ls"]
    for ruin in ruins:
        assert played(wall, tasks, ruin, "<done>")[1]["reward"] == 0.0


def test_a_worker_plays_an_episode(wall: Wall) -> None:
    """From a task to a scored result, with a scripted model: an expert of one task, and on the other a null agent."""
    solution = ["ls -la", "grep -v '^$' names.txt | LC_ALL=C sort -u >sorted.txt"]

    def policy(text: str, turn: int) -> str:
        commands = solution if "sorted.txt" in text else []
        return f"```bash\n{commands[turn]}\n```" if turn < len(commands) else "<done>"

    make = prepared_environment("terminal", tasks=TASKS)
    assert make is not None and maker_of("terminal") is TerminalEnvironment and has_episodes("terminal")
    served = ServedVersions("local")
    served.apply(ack(1))
    server = EpisodeServer(["assistant@v1"], policy)
    limits = EpisodeLimits(max_turns=default_turns("terminal"))
    player = EpisodePlayer(server, policy_calls(served), make, limits, worker_id="w", server_id="local")

    async def answers() -> Any:
        return await asyncio.gather(*(player.answer(of_folder(name), T0) for name in ("sort-names", "sum-usage")))

    (solved,), (failed,) = asyncio.run(asyncio.wait_for(answers(), 120))
    assert (solved.status, solved.ending, len(solved.turns)) == (Status.OK, Ending.DONE, 3)
    assert [call.name for call in solved.tool_calls] == ["task", "bash", "bash", "checks"]
    assert "names.txt" in json.loads(solved.tool_calls[1].result)["output"]
    assert solved.wall.startswith("sandlock/") and 0 in solved.loss_mask and 1 in solved.loss_mask
    assert [verify(each.task, each).reward for each in (solved, failed)] == [1.0, 0.0]
    assert verify(solved.task, solved).components["commands"] == 2.0


def test_the_commands_that_list_show_and_play_tasks(wall: Wall) -> None:
    run = CliRunner()
    listed = run.invoke(app, ["env", "tasks", str(TASKS), "-o", "json"])
    rows = {row["task"]: row for row in json.loads(listed.stdout)}
    assert len(rows) == 10 and rows["sort-names"]["digest"] == task_digest(TASKS / "sort-names")
    assert "terminal" in run.invoke(app, ["env", "list"]).stdout
    shown = run.invoke(app, ["env", "show", "terminal", "sort-names", "--tasks", str(TASKS)])
    assert shown.exit_code == 0 and "Write the names in names.txt" in shown.stdout, shown.output
    typed = "```bash\ngrep -v '^$' names.txt | LC_ALL=C sort -u >sorted.txt\n```\n\n<done>\n\n"
    tried = run.invoke(app, ["env", "try", "terminal", "sort-names", "--tasks", str(TASKS)], input=typed)
    assert tried.exit_code == 0 and "[score] bad_turns 0, commands 1, reward 1" in tried.stdout, tried.output
    refused = run.invoke(app, ["env", "try", "terminal", "sort-names"])
    assert refused.exit_code == 2 and "--tasks FOLDER" in refused.output


ARMED = """mkdir repository && cd repository && git init -q && git commit -q --allow-empty -m begin
win='touch ../solved #'
for hook in pre-commit post-commit post-index-change post-checkout reference-transaction; do
  printf '#!/bin/sh\\ntouch "%s/solved"\\n' "$(cd .. && pwd)" >.git/hooks/$hook; chmod +x .git/hooks/$hook
done
printf '#!/bin/sh\\ntouch "%s/solved"\\n' "$(cd .. && pwd)" >.git/run; chmod +x .git/run; run=$PWD/.git/run
echo '* filter=f diff=d' >.gitattributes; echo x >file
cat >>.git/config <<END
[core] fsmonitor = $run
[CORE]
 HooksPath = $PWD/.git/hooks
[filter "f"]
 clean = $run
 smudge = $run
[diff] external = $run
[diff "d"]
 textconv = $run
[extensions]
 worktreeConfig = true
[include]
 path = more
[alias]
 st = !touch solved
END
printf '[core]\\nfsmonitor = %s\\n' $run >.git/config.worktree; cp .git/config.worktree .git/more
mkdir ../other ../shared; cp -r .git/objects .git/refs .git/hooks .git/config ../shared/
cp .git/HEAD ../other/; echo "$PWD/../shared" >../other/commondir
mkdir ../plain; echo "gitdir: ../other" >../plain/.git; echo x >../plain/file"""
GIT_CHECK = """for each in repository plain; do
  cd /app/$each; git status --short; git add -A; git -c user.name=a -c user.email=a commit -qm end; git diff HEAD~1
done
git -C /app/repository config user.name; git -C /app/repository log --oneline | wc -l
if [ -e /app/solved ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt"""


def test_a_check_that_runs_git_runs_no_program_of_the_agents_repository(wall: Wall, tmp_path: Path) -> None:
    tasks = harbor_task(tmp_path, GIT_CHECK)
    armed = f"```bash\n{ARMED}\n```"
    transitions, score = played(wall, tasks, armed, "```bash\nrm -f solved\n```", "<done>")
    checks = json.loads(transitions[-1].tool_calls[-1].result or "{}")
    assert score["reward"] == 0.0, checks
    assert "2\n" in checks["output"], "the repository works"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tentalis.agents.environments.terminal_checks.disarm_repositories", lambda folder: None)
        assert played(wall, tasks, armed, "```bash\nrm -f solved\n```", "<done>")[1]["reward"] == 1.0


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (
            '[remote "origin"]\n\turl = https://a.example/x.git\n',
            '[remote "origin"]\n\turl = "https://a.example/x.git"\n',
        ),
        ("[user] name = A B\n[core]\n bare=true ; no comment\n", '[user]\n\tname = "A B"\n'),
        ("[core] fsmonitor = a\n[alias]\n\tst = !touch x\n", ""),
        ("[core] ignorecase = true\\\n\n", ""),
        ('[user]\n\tname = "a\\n[core]\\n"\n', ""),
    ],
)
def test_settings_that_name_no_program_are_kept(tmp_path: Path, config: str, kept: str) -> None:
    (tmp_path / "config").write_text(config)
    disarm(tmp_path)
    assert (tmp_path / "config").read_text() == kept
