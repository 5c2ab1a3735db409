"""Ten instances of the environment swe: a scripted expert solves them, a null agent and one that cheats do not."""

import asyncio
import difflib
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from schemas.records import Task, Verifier
from tentalis.agents.environments import EnvironmentOptions, Transition, swe_tests
from tentalis.agents.environments.swe import SweEnvironment
from tentalis.agents.environments.swe_must_fail import must_fail_tests
from tentalis.agents.sandbox import Wall
from tests.support.loop_records import task
from tests.support.swe_packages import PACKAGES, Package
from tests.support.swe_repositories import write_folder
from tests.support.transitions import with_ending

AT_ONCE = 2
PARTS = [pytest.param(PACKAGES[:2], id="two"), pytest.param(PACKAGES[2:], id="others", marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("swe"))


def of_instance(name: str) -> Task:
    message = {"role": "user", "content": name}
    return task(environment="swe", n=1, messages=[message], verifier=Verifier(name="episode"))


async def played(
    wall: Wall, folder: Path, name: str, turns: Sequence[str]
) -> tuple[list[Transition], dict[str, float]]:
    made = SweEnvironment(EnvironmentOptions(lambda: wall, tasks=folder))
    try:
        await made.reset(of_instance(name))
        transitions = [await made.step(turn) for turn in turns]
        score = dict(await made.score())
        return with_ending(transitions, made), score
    finally:
        await made.close()


def all_played(
    wall: Wall, folder: Path, episodes: Sequence[tuple[str, Sequence[str]]]
) -> list[tuple[list[Transition], dict[str, float]]]:
    """Plays episodes, a few at the same time."""

    async def play() -> list[tuple[list[Transition], dict[str, float]]]:
        free = asyncio.Semaphore(AT_ONCE)

        async def one(name: str, turns: Sequence[str]) -> tuple[list[Transition], dict[str, float]]:
            async with free:
                return await played(wall, folder, name, turns)

        return list(await asyncio.gather(*(one(*episode) for episode in episodes)))

    return asyncio.run(play())


def instance_of(package: Package) -> str:
    return f"small__{package.name}-1"


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def edit(path: str, search: str, replace: str) -> str:
    return f'<edit path="{path}">\n<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n</edit>\n'


def correction(package: Package) -> str:
    """The edit that corrects a package: whole lines, with the line before them."""
    wrong, right = (text.splitlines(keepends=True) for text in (package.defective, package.module))
    changes = [code for code in difflib.SequenceMatcher(None, wrong, right).get_opcodes() if code[0] != "equal"]
    first, last = changes[0], changes[-1]
    search, replace = wrong[first[1] - 1 : last[2]], right[first[3] - 1 : last[4]]
    return edit(f"{package.name}.py", "".join(search), "".join(replace))


def expert(package: Package) -> list[str]:
    return [
        f"<plan>\nRun the tests, and correct {package.name}.py.\n</plan>\n{block('ls; git log --oneline')}",
        f"{correction(package)}\n{block('python -m pytest -q -p no:cacheprovider; git status --short')}\n<diff>",
        "<done>",
    ]


@pytest.mark.parametrize("packages", PARTS)
def test_a_scripted_expert_solves_them_and_a_null_agent_does_not(
    wall: Wall, folder: Path, packages: Sequence[Package]
) -> None:
    solved = all_played(wall, folder, [(instance_of(each), expert(each)) for each in packages])
    for package, (transitions, score) in zip(packages, solved, strict=True):
        calls = [call.result for each in transitions for call in each.tool_calls]
        assert score["reward"] == score["fail_to_pass"] == score["pass_to_pass"] == 1.0, (package.name, calls)
        assert score["diff_files"] == 1.0
        seen = transitions[1].observation.messages[0].content
        assert f"{package.name}.py: edited" in seen and "passed" in seen and "diff --git" in seen
    nothing = all_played(wall, folder, [(instance_of(each), ["<done>"]) for each in packages])
    assert [score["reward"] for _, score in nothing] == [0.0] * len(packages)


FILES = """
cat >sitecustomize.py <<'END'
import os
os.environ["WON"] = "1"
END
cp sitecustomize.py usercustomize.py; echo 'import sitecustomize' >x.pth
cat >conftest.py <<'END'
import pytest

@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome = "passed"
END
cp conftest.py tests/; cp conftest.py cheat.py; rm -f tests/test_*.py
printf 'def test_a(): pass\\n' >tests/test_a.py
printf '[pytest]\\naddopts = -p cheat\\npython_files = none.py\\n' >pytest.ini; cp pytest.ini tox.ini
printf '[tool.pytest.ini_options]\\naddopts = "-p cheat"\\n' >pyproject.toml
mkdir -p cheat.dist-info; printf '[pytest11]\\ncheat = cheat\\n' >cheat.dist-info/entry_points.txt
printf 'Metadata-Version: 2.1\\nName: cheat\\nVersion: 1\\n' >cheat.dist-info/METADATA
printf 'def main(*a, **k): return 0\\n' >pytest.py; cp pytest.py pluggy.py; mkdir -p _pytest; touch _pytest/__init__.py
for hook in post-checkout pre-commit post-index-change; do
  mkdir -p .git/hooks; printf '#!/bin/sh\\ntouch won\\n' >.git/hooks/$hook; chmod +x .git/hooks/$hook
done
printf '[core]\\n fsmonitor = touch won\\n hooksPath = .git/hooks\\n' >>.git/config
mkdir -p ~/.config/git; cp .git/config ~/.gitconfig
export PYTHONPATH=$PWD PYTEST_ADDOPTS='-p cheat' PYTEST_PLUGINS=cheat"""
LINKS = """rm -rf tests; mkdir -p ../mine; printf 'def test_a(): pass\\n' >../mine/test_a.py; ln -s ../mine tests
mkfifo pipe 2>/dev/null; ln -s / root; ln -s /etc/passwd secret; git init -q inner; chmod 0 inner; exit 0"""


@pytest.mark.parametrize("packages", PARTS)
def test_an_agent_that_cheats_with_files_gets_nothing(wall: Wall, folder: Path, packages: Sequence[Package]) -> None:
    turns = [block(FILES), block(LINKS)]
    episodes = [(instance_of(each), [turns[number % 2], "<done>"]) for number, each in enumerate(packages)]
    for name, (transitions, score) in zip(episodes, all_played(wall, folder, episodes), strict=True):
        verdict = json.loads(transitions[-1].tool_calls[-1].result or "{}")
        assert (score["reward"], score["fail_to_pass"]) == (0.0, 0.0), (name, verdict)
        assert "passed" in verdict["outcomes"].values(), "the tests ran, and those that passed before do"


def test_the_files_of_a_cheat_are_what_is_left_out(wall: Wall, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, the same file lets every test pass, which the tests that must fail show."""
    cheat = FILES[FILES.index("cat >conftest.py") : FILES.index("cp conftest.py tests/")]
    episode = [("small__months-1", [block(cheat), "<done>"])]
    ((_, left_out),) = all_played(wall, folder, episode)
    assert "forged" not in left_out and left_out["pass_to_pass"] == 1.0
    monkeypatch.setattr(swe_tests.KeptPaths, "covers", lambda self, path: False)
    ((_, kept),) = all_played(wall, folder, episode)
    assert (kept["forged"], kept["reward"]) == (1.0, 0.0)


IN_PROCESS = {
    "exits": ("import os; os._exit(0)", "tests_stopped"),
    "exits at the end": ("import atexit, os; atexit.register(os._exit, 0); raise SystemExit(0)", None),
    "lets every test pass": (
        "import _pytest.reports\n"
        "_pytest.reports.TestReport.failed = property(lambda self: False)\n"
        "_pytest.reports.BaseReport.failed = property(lambda self: False)\n"
        "_pytest.reports.TestReport.from_item_and_call = (lambda made: classmethod(lambda cls, item, call:\n"
        "    (report := made(item, call), setattr(report, 'outcome', 'passed'))[0]))(\n"
        "    _pytest.reports.TestReport.from_item_and_call)",
        "forged",
    ),
    "runs no test": (
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n"
        "import _pytest.unittest\n_pytest.unittest.TestCaseFunction.runtest = lambda self: None",
        "forged",
    ),
    "writes the tests": (
        "import glob\nfor each in glob.glob('tests/*.py') + glob.glob('*.py'):\n"
        "  try: open(each, 'w').write('def test_centuries(): pass')\n"
        "  except OSError: continue",
        None,
    ),
    "writes a report": (
        "import json, os, sys\nreport = json.load(open(sys.argv[1]))['report']\n"
        "class All(dict): pass\n"
        "json.dump({'outcomes': {'tests/test_months.py::test_centuries[1900-28]': 'passed'}, 'ended': 0},"
        " open(report, 'w'))\nos._exit(0)",
        "tests_stopped",
    ),
    "changes the report as it is made": (
        "import json\nmade = json.dumps\n"
        "def changed(value):\n"
        "    return {**value, 'outcomes': {name: 'passed' if 'months' in name else outcome\n"
        "        for name, outcome in value['outcomes'].items()}}\n"
        "json.dumps = lambda value, **more: made(changed(value), **more)",
        None,
    ),
    "changes the report at the end": (
        "import atexit, json, sys\nplace = json.load(open(sys.argv[1]))['report']\n"
        "def change():\n"
        "    value = json.load(open(place))\n"
        "    for name in value['outcomes']:\n"
        "        if 'months' in name: value['outcomes'][name] = 'passed'\n"
        "    json.dump(value, open(place, 'w'))\n"
        "atexit.register(change)",
        None,
    ),
    "spares tests whose names look drawn": (
        "import re, _pytest.reports\n"
        "_pytest.reports.TestReport.from_item_and_call = (lambda made: classmethod(lambda cls, item, call:\n"
        "    (report := made(item, call), re.search('test_case[0-9a-f]{8}', item.nodeid)\n"
        "        or setattr(report, 'outcome', 'passed'))[0]))(_pytest.reports.TestReport.from_item_and_call)",
        "forged",
    ),
}


def test_an_agent_whose_code_cheats_in_the_process_of_the_tests_gets_nothing(wall: Wall, folder: Path) -> None:
    codes = [code for code, _ in IN_PROCESS.values()]
    episodes = [("small__months-1", [block(f"cat >>months.py <<'END'\n{code}\nEND"), "<done>"]) for code in codes]
    scores = [score for _, score in all_played(wall, folder, episodes)]
    found = {
        name: (score["reward"], part is None or score.get(part))
        for (name, (_, part)), score in zip(IN_PROCESS.items(), scores, strict=True)
    }
    assert found == dict.fromkeys(IN_PROCESS, (0.0, 1.0)), scores


def test_no_fixed_pattern_tells_the_tests_that_must_fail() -> None:
    ids = ("pkg/tests/date_test.py::TestDays::test_leap_years[2000-29]", "pkg/tests/date_test.py::test_days_of_month")
    made = [must_fail_tests(ids, frozenset(), random.Random(seed)) for seed in range(50)]
    assert len({each.path for each in made}) > 40 and len({each.text for each in made}) == 50
    names = [set(re.findall("def (test_\\w+)", each.text)) for each in made]
    assert all(len(each) == 5 for each in names) and len(set.union(*names)) > 200
    assert {name.count("_") for each in names for name in each} == {2, 3}
    assert any("leap" in name or "years" in name for each in names for name in each)
    for each in made:
        assert re.fullmatch("pkg/tests/[a-z_]+_test\\.py", each.path)
        compile(each.text, each.path, "exec")
    path = made[0].path
    assert must_fail_tests(ids, frozenset([path.rpartition("/")[2]]), random.Random(0)).path != path
    assert made[0].outcomes_agree(["failed"] * 5)
    assert not any(made[0].outcomes_agree(["failed"] * n + ["passed"] * (5 - n)) for n in range(5))
    assert not made[0].outcomes_agree(["failed"] * 4)


def test_what_follows_the_base_commit_is_not_within_reach(wall: Wall, folder: Path) -> None:
    """Neither the correction in the history, nor the hidden tests and the instances."""
    instance = json.loads((folder / "instances.jsonl").read_text().splitlines()[0])
    look = f"""git log --all --oneline; git tag; git branch -a; git reflog; git stash list; git fsck --lost-found
git rev-list --all --objects | wc -l; ls -a .git .git/refs/heads; cat .git/packed-refs .git/FETCH_HEAD .git/ORIG_HEAD
for each in $(git cat-file --batch-all-objects --batch-check | cut -d' ' -f1); do git cat-file -p $each; done
git remote -v; cat {folder}/instances.jsonl; ls {folder} {folder}/repos ../../../store ../../../checks
git -C {folder}/repos/small__roman log; git fetch {folder}/repos/small__roman"""
    ((transitions, _),) = all_played(wall, folder, [(instance["instance_id"], [block(look), "<done>"])])
    recorded = json.loads(transitions[0].tool_calls[-1].result or "{}")["output"]
    assert instance["base_commit"][:7] in recorded and "Add the package" in recorded, "the history before it is there"
    for word in ("Correct it", "test_differences", "(900", "Remove the tests", "v1.0", "FAIL_TO_PASS", "commit-tree"):
        assert word not in recorded, word
