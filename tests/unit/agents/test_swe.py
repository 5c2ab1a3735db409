"""The environment swe: instances, turns, edits, the folders that are compared, rewards, and an episode of a worker."""

import asyncio
import json
import os
import shutil
import venv
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.records import Ending, Status, Task, Verifier
from tentalis.agents.environments import EnvironmentFault, EnvironmentOptions, LimitsScore, Transition
from tentalis.agents.environments.registry import default_turns, has_episodes, maker_of, prepared_environment
from tentalis.agents.environments.regrading import TestsRegrader
from tentalis.agents.environments.swe import SweEnvironment
from tentalis.agents.environments.swe_instances import SweFolder, SweInstance, SweSettings, SweTask
from tentalis.agents.environments.swe_repository import diff_of_trees
from tentalis.agents.environments.swe_tests import kept_paths, n_lines_of
from tentalis.agents.environments.swe_trees import ChangesTooLarge, carry, changes_between, check_size
from tentalis.agents.environments.swe_turns import NO_ACTION, SweEdit, SweTurn, parsed_swe_turn
from tentalis.agents.environments.terminal_checks import CHECKS
from tentalis.agents.environments.terminal_task import BadTasks
from tentalis.agents.sandbox import Wall
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.cli.main import app
from tentalis.policies.served import ServedVersions
from tentalis.rewards.registry import verify
from tests.support.capabilities import output_under_rights
from tests.support.episode_server import EpisodeServer
from tests.support.loop_records import T0, ack, task
from tests.support.swe_packages import PACKAGES
from tests.support.swe_repositories import INSTANCES, git, smith_instance, write_folder, write_repository
from tests.support.transitions import with_ending
from tests.support.worker_lab import policy_calls
from tests.unit.agents.test_swe_tasks import block, correction, edit

MONTHS = next(each for each in PACKAGES if each.name == "months")
ROMAN = PACKAGES[0]
NAME = "small__months-1"
ROW: dict[str, Any] = json.loads(INSTANCES.read_text().splitlines()[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of instances, with one of SWE-smith too."""
    made = write_folder(tmp_path_factory.mktemp("swe"))
    instance = write_repository(MONTHS, made / "repos/swesmith__months")
    (made / "smith.json").write_text(json.dumps([smith_instance(MONTHS, instance)]))
    return made


def of_instance(name: str = NAME, **data: Any) -> Task:
    verifier = Verifier(name="episode", data=json.dumps(data))
    return task(environment="swe", n=1, messages=[{"role": "user", "content": name}], verifier=verifier)


def played(wall: Wall, folder: Path, *turns: str, of: Task | None = None) -> tuple[list[Transition], dict[str, float]]:
    async def play() -> tuple[list[Transition], dict[str, float]]:
        made = SweEnvironment(EnvironmentOptions(lambda: wall, tasks=folder))
        try:
            await made.reset(of or of_instance())
            transitions = [await made.step(turn) for turn in turns]
            score = dict(await made.score())
            return with_ending(transitions, made), score
        finally:
            await made.close()

    return asyncio.run(play())


def said(transition: Transition) -> str:
    return "".join(message.content for message in transition.observation.messages)


def test_the_committed_instances_are_those_of_the_packages(tmp_path: Path) -> None:
    made = [write_repository(each, tmp_path / each.name) for each in PACKAGES]
    assert [json.loads(line) for line in INSTANCES.read_text().splitlines()] == made


def test_an_instance_of_swe_smith_is_played(wall: Wall, folder: Path) -> None:
    smith = json.loads((folder / "smith.json").read_text())[0]["instance_id"]
    look = block("git log --oneline; ls tests; git log --all --format=%s | sort -u")
    transitions, score = played(wall, folder, look, correction(MONTHS), "<done>", of=of_instance(smith))
    assert score["reward"] == 1.0, transitions[-1].tool_calls
    assert "The repository" in said(transitions[0]) and "Bug patch" not in said(transitions[0])
    assert "test_months.py" not in said(transitions[0])


def with_configuration(folder: Path, made: Path, text: str) -> Path:
    """Writes a folder with one instance, whose base commit has a pytest.ini and a test that is named otherwise."""
    repository = made / "repos/own"
    git(folder, "clone", "-q", str(folder / "repos/small__roman"), str(repository))
    git(repository, "checkout", "-q", ROW["base_commit"])
    (repository / "pytest.ini").write_text(f"[pytest]\n{text}\n")
    (repository / "tests/test_more.py").write_text("def check_it():\n    pass\n\n\ndef test_it():\n    pass\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "Configure the tests")
    base = git(repository, "rev-parse", "HEAD").strip()
    more = ["tests/test_more.py::check_it" if "check" in text else "tests/test_more.py::test_it"]
    row = ROW | {"repo": "small/own", "base_commit": base, "PASS_TO_PASS": more}
    (made / "swe.yaml").write_text(f"python: {folder}/python\n")
    (made / "instances.jsonl").write_text(json.dumps(row))
    return made


@pytest.mark.parametrize("text", ["addopts = -x", "addopts = --maxfail=2", "python_functions = check"])
def test_the_configuration_of_a_repository_hides_no_test(wall: Wall, folder: Path, tmp_path: Path, text: str) -> None:
    """A run that stops at the first failure, or collects other names, leaves out tests that must fail."""
    made = with_configuration(folder, tmp_path, text)
    transitions, score = played(wall, made, correction(ROMAN), "<done>", of=of_instance(ROW["instance_id"]))
    assert score["reward"] == 1.0, (score, transitions[-1].tool_calls[-1])


def test_the_size_of_the_patch_can_cost_a_part_of_the_reward(wall: Wall, folder: Path) -> None:
    weighed = of_instance(diff_weight=0.5, diff_lines=8)
    _, score = played(wall, folder, correction(MONTHS), "<done>", of=weighed)
    assert score["diff_lines"] == 2.0 and score["reward"] == 1.0 - 0.5 * 2 / 8
    longer = block("for n in $(seq 90); do echo >>README; done")
    assert played(wall, folder, correction(MONTHS), longer, "<done>", of=weighed)[1]["reward"] == 0.5


def test_edits_show_what_they_did(wall: Wall, folder: Path) -> None:
    several = "".join(edit("a.py", "", text) + "\n" for text in ("one\ntwo\n", "again\n"))
    turns = [
        "<plan>first this</plan>",
        several,
        edit("/testbed/a.py", "two\n", "2\n") + edit("a.py", "none\n", "2\n") + block("cat a.py; pwd"),
        edit("no/folder/b.py", "", "b\n") + "\n<diff>",
        edit("../../state/x", "", "") + edit("/etc/x", "", "") + edit("../../../../x", "", ""),
        block("ln -s /etc/passwd link; echo 'x' >twice; echo x >>twice"),
        edit("link", "root\n", "x\n") + edit("twice", "x\n", "y\n"),
        "no action",
    ]
    transitions, score = played(wall, folder, *turns, "<done>")
    seen = [said(each) for each in transitions]
    assert seen[0] == "[the plan is noted]"
    assert "/testbed/a.py: edited" in seen[1] and "an empty SEARCH makes a new file" in seen[1]
    assert "/testbed/a.py: edited" in seen[2] and "0 times" in seen[2] and "one\n2\n/testbed" in seen[2]
    assert "+b" in seen[3] and "diff --git a/a.py" in seen[3]
    assert "/etc/x: Permission denied" in seen[4]
    assert "link: Permission denied" in seen[6] and "2 times" in seen[6]
    assert seen[7] == NO_ACTION and (score["bad_turns"], score["edits"], score["commands"]) == (1.0, 10.0, 2.0)
    names = [call.name for call in transitions[2].tool_calls]
    assert names == ["edit", "edit", "bash"]
    patch = json.loads(transitions[-1].tool_calls[-2].result or "{}")
    assert patch["whole"] and "+one\n+2\n" in patch["patch"] and "passwd" not in patch["patch"]


BLOCK_A, BLOCK_B = (f"<<<<<<< SEARCH\n{each}\n=======\nnew\n>>>>>>> REPLACE\n" for each in "ab")
EDIT_A, EDIT_B = (SweEdit("f.py", f"{each}\n", "new\n") for each in "ab")


def several(blocks: str) -> str:
    return f'<edit path="f.py">\n{blocks}</edit>'


def outside(line: str) -> SweTurn:
    shown = f"{line!r} is outside of a block; nothing of this turn is done"
    return SweTurn(problem=f"f.py: an edit needs lines between <<<<<<< SEARCH, ======= and >>>>>>> REPLACE: {shown}")


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("<think><done>```bash\nls\n```</think>ok <done>", SweTurn(done=True)),
        ("I plan.\n```bash\nls\n```\n<done>", SweTurn(command="ls", done=True)),
        ('```bash\ncat <<E\n<edit path="a">\n<done>\nE\n```', SweTurn(command='cat <<E\n<edit path="a">\n<done>\nE')),
        ("```\nls\n```\n```\npwd\n```\n<done>", SweTurn(command="ls", left_out=1)),
        (
            edit("a", "```bash\nls\n```\n", "") + "<diff>",
            SweTurn(edits=(SweEdit("a", "```bash\nls\n```\n", ""),), diff=True),
        ),
        (
            '<edit path="a">\nnothing\n</edit>',
            SweTurn(problem="a: an edit needs lines between <<<<<<< SEARCH, ======= and >>>>>>> REPLACE"),
        ),
        ("<diff>", SweTurn(diff=True)),
        (several(f"{BLOCK_A}{BLOCK_B}"), SweTurn(edits=(EDIT_A, EDIT_B))),
        (several(f"{BLOCK_A}\n```\n```python\n{BLOCK_B}```\n"), SweTurn(edits=(EDIT_A, EDIT_B))),
        (several(f"{BLOCK_A}{BLOCK_B.replace('=======', '====')}"), outside("<<<<<<< SEARCH")),
        (several(f"{BLOCK_A}{BLOCK_B.replace('<<<<<<< SEARCH', '<<<<<< SEARCH')}"), outside("<<<<<< SEARCH")),
        (several(f"{BLOCK_A}<<<<<<< SEARCH\nb\n=======\n"), outside("<<<<<<< SEARCH")),
        (several(f"{BLOCK_A}{'x' * 300}\n"), outside("x" * 80)),
        ("<plan>\na\nb</plan>\n<done>", SweTurn(plan="a\nb", done=True)),
        ("say <plan> and <diff>", SweTurn(problem=NO_ACTION)),
        ("```bash\nls\0\n```", SweTurn(problem="no action may have a zero byte")),
        ("```bash\n" + "x" * 70_000 + "\n```", SweTurn(problem="a command has at most 65536 bytes")),
    ],
)
def test_the_actions_of_a_turn(text: str, turn: SweTurn) -> None:
    assert parsed_swe_turn(text) == turn


def test_the_changed_lines_of_a_patch(tmp_path: Path) -> None:
    """Lines of a file may look like the heads of a patch."""
    old = tree(tmp_path / "old", a="-- comment\nb\nc\n", d="one\n", gone="x\n")
    new = tree(tmp_path / "new", a="b\nc\n++ d\n@@ e\ndiff --git f", d="two\n", made="1\n2\n")
    (new / "binary").write_bytes(b"\0\n\n")
    assert n_lines_of(diff_of_trees(old, new)) == 1 + 3 + 2 + 1 + 2
    assert n_lines_of(b"") == 0


def tree(folder: Path, **files: str) -> Path:
    for path, text in files.items():
        place = folder / path.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


def test_changes_are_carried_to_another_folder(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", a="1", b="1", d__e="1", file="1", kept="1", x="1")
    (old / "link").symlink_to("kept")
    (old / "folder").symlink_to("d")
    new = tree(tmp_path / "new", a="2", d__e="1", file__inner="2", kept="1", x="1", folder__real="3", dir__y="4")
    for name, leads_to in {"link": "a", "out": "../old", "root": "/etc", "deep": "d/../kept"}.items():
        (new / name).symlink_to(leads_to)
    (new / "x").chmod(0o755)
    (new / ".git").mkdir()
    (new / ".git/config").write_text("1")
    os.mkfifo(new / "pipe")
    changes = changes_between(old, new)
    assert changes.removed == {"b", "file", "folder"}
    assert set(changes.written) == {"a", "x", "file/inner", "folder/real", "dir/y", "link", "deep"}
    target = tree(tmp_path / "target", a="1", b="1", d__e="1", file="1", kept="1", x="1", dir="in the way")
    (target / "link").symlink_to("kept")
    (target / "folder").symlink_to("../old")
    carry(changes, new, target)
    assert (target / "file/inner").read_text() == "2" and (target / "dir/y").read_text() == "4"
    assert (target / "folder/real").read_text() == "3" and not (target / "folder").is_symlink()
    assert not (old / "real").exists(), "nothing is written through a link"
    assert (target / "link").readlink() == Path("a") and os.access(target / "x", os.X_OK)
    assert sorted(each.name for each in target.iterdir()) == [
        "a",
        "d",
        "deep",
        "dir",
        "file",
        "folder",
        "kept",
        "link",
        "x",
    ]
    assert changes_between(new, target).paths == frozenset()
    check_size(changes, 10, 100)
    for files, size in ((9, 100), (10, 3)):
        with pytest.raises(ChangesTooLarge):
            check_size(changes, files, size)


def test_the_paths_that_hidden_tests_set() -> None:
    row = json.loads(INSTANCES.read_text().splitlines()[0])
    ids = ("pkg/sub/tests/unit/test_a.py::test_a", "test_top.py::test_b")
    instance = SweInstance.model_validate({**row, "FAIL_TO_PASS": ids, "PASS_TO_PASS": []})
    of = SweTask(instance, Path("/"), None, (".",), SweSettings())
    kept = kept_paths(of, frozenset({"docs/data.txt"}))
    covered = [
        *("pkg/sub/tests/helpers.py", "pkg/sub/tests", "pkg", "test_top.py", "docs/data.txt", "a/conftest.py"),
        *("setup.cfg", "x.pth", "x.dist-info/entry_points.txt", "sitecustomize.py"),
    ]
    assert [path for path in covered if not kept.covers(path)] == []
    assert [
        path for path in ("pkg/sub/core.py", "pkg/tests/x.py", "docs/other.txt", "tests.py") if kept.covers(path)
    ] == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"repo": "small/absent"}, "the repository small/absent .* put a clone or a bundle"),
        ({"base_commit": "0" * 40}, "does not have the commit 0000"),
        ({"base_commit": "--upload-pack=x"}, "must be a commit"),
        ({"base_commit": None}, "does not have the branch small__roman-1 of SWE-smith"),
        ({"FAIL_TO_PASS": '["test_a (module.Case)"]'}, "named as pytest does"),
        ({"FAIL_TO_PASS": ["../x.py::test_a"]}, "named as pytest does"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
        ({"test_patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n"}, "git apply failed"),
        ({"repo": "pytest-dev/pytest"}, "would test itself"),
    ],
)
def test_an_instance_that_cannot_be_played_is_a_fault(
    wall: Wall, folder: Path, tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    made = tmp_path / "tasks"
    made.mkdir()
    (made / "repos").symlink_to(folder / "repos")
    (made / "swe.yaml").write_text(f"python: {folder}/python\n")
    (made / "instances.jsonl").write_text(json.dumps(ROW | changed))
    with pytest.raises(EnvironmentFault, match=reason):
        played(wall, made, "<done>", of=of_instance(ROW["instance_id"]))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no instances"),
        ({"a.jsonl": "{}"}, "`instance_id`"),
        ({"a.jsonl": "{"}, "line 1"),
        ({"a.json": json.dumps([ROW]), "b.jsonl": json.dumps(ROW)}, "there twice"),
        ({"a.json": json.dumps([ROW]), "swe.yaml": "python: none"}, "not a virtual environment"),
        ({"a.json": json.dumps([ROW]), "swe.yaml": "step: 3"}, "step"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(BadTasks, match=reason):
        SweFolder(tmp_path)


def test_a_changed_instance_and_a_python_without_pytest_are_noticed(wall: Wall, folder: Path, tmp_path: Path) -> None:
    right = SweFolder(folder).task(NAME).digest
    assert played(wall, folder, "<done>", of=of_instance("say", task=NAME, digest=right))[1]["reward"] == 0.0
    with pytest.raises(EnvironmentFault, match="has changed"):
        played(wall, folder, "<done>", of=of_instance(digest="0" * 64))
    made = tree(tmp_path / "tasks", instances__jsonl="")
    (made / "instances.jsonl").write_text(json.dumps(ROW))
    (made / "repos").symlink_to(folder / "repos")
    venv.create(made / "bare", symlinks=True)
    (made / "swe.yaml").write_text("python: bare\n")
    with pytest.raises(EnvironmentFault, match="runs no pytest"):
        played(wall, made, "<done>", of=of_instance(ROW["instance_id"]))


def test_tasks_that_commands_could_read_are_refused(wall: Wall, tmp_path: Path) -> None:
    made = tree(tmp_path / "python/tasks", bin__x="")
    (made / "a.jsonl").write_text(json.dumps(ROW))
    venv.create(tmp_path / "python", symlinks=True)
    (made / "swe.yaml").write_text("python: ..\n")
    with pytest.raises(BadTasks, match=r"checks and solutions .*: move it"):
        SweEnvironment(EnvironmentOptions(lambda: wall, tasks=made))


@pytest.mark.parametrize("how", ["source", "link", "worker"])
def test_repositories_that_commands_could_read_are_refused(
    wall: Wall, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The agent would see the later commits, although the folder of instances is out of its reach."""
    made, within = tree(tmp_path / "tasks", repos__other=""), tmp_path / "python/src"
    (made / "instances.jsonl").write_text(json.dumps(ROW))
    shutil.copytree(folder / "python", tmp_path / "python", symlinks=True)
    within.mkdir()
    git(within, "clone", "-q", "--bare", str(folder / "repos/small__roman"), "roman.git")
    settings: dict[str, Any] = {"python": str(tmp_path / "python")}
    if how == "link":
        (made / "repos/roman.git").symlink_to(within / "roman.git")
    elif how == "source":
        settings |= {"repositories": {"small/roman": {"source": "../python/src/roman.git"}}}
    else:  # this repository is run by the worker's Python, and another one names its Python
        monkeypatch.setattr("sys.prefix", settings["python"])
        own = {"small/roman": {"source": str(within / "roman.git")}, "small/other": {"python": f"{folder}/python"}}
        settings = {"repositories": own}
    (made / "swe.yaml").write_text(json.dumps(settings))
    with pytest.raises(BadTasks, match=f"later commits of .*{within}/roman.git"):
        SweEnvironment(EnvironmentOptions(lambda: wall, tasks=made))


LEFT = """
import json, sys
from pathlib import Path
from tentalis.agents.sandbox import choose_wall
from tests.unit.agents.test_swe import block, correction, MONTHS, played

fix = correction(MONTHS)
locked = "mkdir -p locked/in; echo x >locked/in/f; chmod 0 locked/in locked months.py tests; chmod 0 .git . .. ../.."
deep = "for n in $(seq 40); do mkdir -p $(printf 'd%.0s' $(seq 200)) && cd d*; done; cd /testbed"
inner = "git init -q inner; cd inner; git commit -q --allow-empty -m x; mkfifo f; echo \\udc80"
print(json.dumps([played(choose_wall(), Path(sys.argv[1]), fix, block(each), "<done>")[1]["reward"]
    for each in (locked, deep, inner, "rm -rf .git; echo '*' >.gitignore")]))
"""


@pytest.mark.usefixtures("wall")
def test_an_agent_cannot_make_a_fault_of_its_failure(folder: Path) -> None:
    """A correction counts, whatever else the agent did to its folder."""
    assert json.loads(output_under_rights(LEFT, folder)) == [1.0] * 4


@pytest.mark.parametrize("place", ["/testbed", "/testbed/.."])
def test_a_repository_that_was_replaced_by_a_link_is_none(wall: Wall, folder: Path, tmp_path: Path, place: str) -> None:
    """Else the worker would read files for the agent that the wall keeps from it."""
    tree(tmp_path / "secrets/testbed", key="the-secret")
    leads_to = str(tmp_path / ("secrets/testbed" if place == "/testbed" else "secrets")).replace("/", "${root}")
    link = f"p=$(cd {place}; pwd -P); root=$(printf '\\057'); cd $HOME; mv $p $p.moved; ln -s {leads_to} $p; ls -ld $p"
    turns = [correction(MONTHS), block(link), "<done>"]
    transitions, score = played(wall, folder, *turns)
    assert (score["reward"], score["no_repository"]) == (0.0, 1.0), said(transitions[1])
    assert "the-secret" not in str(transitions[-1].tool_calls)


def test_the_tests_run_when_the_episode_is_scored(wall: Wall, folder: Path) -> None:
    """Not in its last step, which has the rest of the commands' time."""

    async def ran() -> list[bool]:
        made = SweEnvironment(EnvironmentOptions(lambda: wall, tasks=folder))
        try:
            await made.reset(of_instance())
            assert (await made.step("<done>")).done and made._folder is not None
            assert isinstance(made, LimitsScore) and made.score_s == SweFolder(folder).settings.tests_s
            checks = made._folder / CHECKS
            before = checks.exists()
            await made.score()
            return [before, checks.exists()]
        finally:
            await made.close()

    assert asyncio.run(ran()) == [False, True]


def test_without_git_a_worker_does_not_start(
    wall: Wall, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its episodes would be an infrastructure fault: the images have no git."""
    options = EnvironmentOptions(lambda: wall, tasks=folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    for make in (SweEnvironment, TestsRegrader):
        with pytest.raises(BadTasks, match="needs the program git"):
            make(options)


def test_a_patch_that_is_too_large_gets_nothing(wall: Wall, folder: Path) -> None:
    many = block("mkdir many; cd many; for n in $(seq 600); do echo >$n; done")
    _, score = played(wall, folder, correction(MONTHS), many, "<done>")
    assert (score["reward"], score["diff_too_large"]) == (0.0, 1.0)


def test_nothing_of_an_episode_is_left(
    wall: Wall, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    played(wall, folder, block("(setsid sleep 600 &)"), "<done>")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_plays_an_episode(wall: Wall, folder: Path) -> None:
    """From a task to a scored result, with a scripted model."""
    turns = ["<plan>The rule of centuries.</plan>\n" + block("cat months.py"), correction(MONTHS), "<done>"]
    make = prepared_environment("swe", tasks=folder)
    assert make is not None and maker_of("swe") is SweEnvironment and has_episodes("swe")
    served = ServedVersions("local")
    served.apply(ack(1))
    server = EpisodeServer(["assistant@v1"], lambda text, turn: turns[turn])
    limits = EpisodeLimits(max_turns=default_turns("swe"))
    player = EpisodePlayer(server, policy_calls(served), make, limits, worker_id="w", server_id="local")
    (solved,) = asyncio.run(asyncio.wait_for(player.answer(of_instance(), T0), 120))
    assert (solved.status, solved.ending, len(solved.turns)) == (Status.OK, Ending.DONE, 3)
    assert [call.name for call in solved.tool_calls] == ["task", "plan", "bash", "edit", "patch", "tests"]
    assert solved.wall.startswith("sandlock/") and 0 in solved.loss_mask and 1 in solved.loss_mask
    verdict = verify(solved.task, solved)
    assert verdict.reward == 1.0 and verdict.components["fail_to_pass"] == 1.0


def test_the_commands_that_list_show_and_play_instances(wall: Wall, folder: Path) -> None:
    run = CliRunner()
    listed = run.invoke(app, ["env", "tasks", str(folder), "-o", "json"])
    rows = {row["task"]: row for row in json.loads(listed.stdout)}
    assert len(rows) == 11 and rows[NAME]["digest"] == SweFolder(folder).task(NAME).digest
    shown = run.invoke(app, ["env", "show", "swe", NAME, "--tasks", str(folder)])
    assert shown.exit_code == 0 and "days(1900, 2) gives 29" in shown.stdout, shown.output
    tried = run.invoke(
        app, ["env", "try", "swe", NAME, "--tasks", str(folder)], input=f"{correction(MONTHS)}\n\n<done>\n\n"
    )
    assert tried.exit_code == 0 and "reward 1," in tried.stdout, tried.output
    refused = run.invoke(app, ["env", "try", "swe", NAME])
    assert refused.exit_code == 2 and "--tasks FOLDER" in refused.output
