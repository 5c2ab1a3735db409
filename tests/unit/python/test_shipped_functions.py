"""Functions of scripts and cells become files that another process loads; what cannot be written is named."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tentalis.learning.errors import LearnError
from tentalis.python.shipped_functions import place_of, source_with_uses
from tentalis.rewards.functions.scorer import load
from tests.support import ROOT
from tests.support.loop_records import result, task

SCRIPT = """
from __future__ import annotations
import json
import math as m
import re
from dataclasses import dataclass
from collections import Counter as Count
from pathlib import Path

LIMIT, NAMES = 3, {"a": [1, 2.5], "b": None}
WORD = re.compile(r"\\w+", re.ASCII)
client = object()

@dataclass
class Part:
    value: float

    def scaled(self) -> Undefined:
        return Part(self.value / helper_of_class())

def helper_of_class():
    return LIMIT

def counted(text: str) -> int:
    client = 1  # a local name of something that cannot be written
    return len(WORD.findall(text)) + client - 1

def outer(base):
    def inner(completions, **columns):
        return [base + Part(counted(each)).scaled().value + m.floor(0.5) + len(Count()) for each in completions]
    return inner

score = outer(1.0)
NAMES["b"] = LIMIT

def uses_client(completions, **columns):
    return [client]

def uses_lambda(completions, **columns):
    return [shorter(each) for each in completions]

shorter = lambda text: 0.5
again = counted

async def later(completions, **columns):
    return [again(each) / len(NAMES["a"]) for each in completions]
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of a script that ran as `__main__`."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    main = types.ModuleType("__main__")
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(compile(SCRIPT, str(path), "exec"), vars(main))
    finally:
        sys.modules["__main__"] = before
    return vars(main)


@pytest.fixture
def in_script(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    vars(main).update(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return script


@pytest.mark.parametrize(("name", "reward"), [("score", 2.0), ("later", 1.5)])
def test_a_function_of_a_script_is_written_with_all_that_it_uses(
    name: str, reward: float, in_script: dict[str, Any], tmp_path: Path
) -> None:
    place = place_of(in_script[name], tmp_path)
    path, _, function = place.target.rpartition(":")
    assert Path(path).parent == tmp_path.resolve() and place.folders == ()
    assert "client = object" not in Path(path).read_text(encoding="utf-8")
    scorer = load(place.target, range=(0, 4))
    of = task()
    verdict = scorer.verify(of, result(of, text="three short words"))
    scorer.close()
    assert verdict.components["raw"] == reward and function == in_script[name].__name__
    assert place_of(in_script[name], tmp_path) == place


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("uses_client", "uses_client uses client, which is a object: .* Make client within the function"),
        ("uses_lambda", "uses shorter, which is a lambda"),
        ("shorter", "write a `def`"),
        ("Part", "Part.* is type, not a function"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    name: str, words: str, in_script: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(LearnError, match=words):
        place_of(in_script[name], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_function_typed_at_a_prompt_is_refused(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(completions): return [1.0]", names)
    with pytest.raises(LearnError, match=r"source of score cannot be read .* put it into a file"):
        place_of(names["score"], tmp_path)


def test_a_function_of_a_module_is_loaded_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    for path in (tmp_path / "own_package" / "__init__.py", tmp_path / "own_module.py"):
        path.write_text("def score(completions):\n    return [1.0]\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_module  # type: ignore[import-not-found]
    import own_package  # type: ignore[import-not-found]

    written = tmp_path / "written"
    assert place_of(own_module.score, written).target == f"{tmp_path.resolve() / 'own_module.py'}:score"
    found = place_of(own_package.score, written)
    assert (found.target, found.folders) == ("own_package:score", (tmp_path.resolve(),))
    assert place_of(pytest.approx, written).folders == ()  # installed
    assert not written.exists()
    load(found.target, python_path=[*map(str, found.folders)]).close()


USES_MODULES = """
import json
from beside_it import grade
from math import floor

def score(completions, **columns):
    import in_lib.part
    import schemas
    try:
        import nobody_has_this
    except ModuleNotFoundError:
        return [grade(each) + in_lib.part.HALF + floor(0.5) for each in completions]
"""


def test_modules_beside_a_script_are_found_by_its_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, lib, home = tmp_path / "script", tmp_path / "lib", tmp_path / "home"
    for path, text in (
        (script / "beside_it.py", "def grade(text):\n    return len(text) / 100\n"),
        (lib / "in_lib" / "__init__.py", ""),
        (lib / "in_lib" / "part.py", "HALF = 0.5\n"),
        (script / "train.py", USES_MODULES),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in (lib, script):
        monkeypatch.syspath_prepend(str(folder))
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(USES_MODULES, str(script / "train.py"), "exec"), vars(main))

    place = place_of(main.score, home)
    assert place.folders == (script.resolve(), lib.resolve()), "the order of the module path"
    scorer = load(place.target, python_path=[*map(str, place.folders)])
    of = task()
    assert scorer.verify(of, result(of, text="ten letters")).reward == pytest.approx(0.61)
    name = scorer.name
    scorer.close()
    (script / "beside_it.py").write_text("def grade(text):\n    return 0\n", encoding="utf-8")
    again = load(place.target, python_path=[*map(str, place.folders)])
    again.close()
    assert again.name != name, "the digest of the function covers the module"


def test_a_constant_keeps_its_value(in_script: dict[str, Any]) -> None:
    source = source_with_uses(in_script["later"])
    names: dict[str, Any] = {}
    exec(source, names)
    assert names["NAMES"] == {"a": [1, 2.5], "b": 3}
    assert names["WORD"].flags & re.ASCII


def loaded_by(code: str) -> set[str]:
    code = f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_import_tentalis_loads_nothing_and_learn_no_torch() -> None:
    assert {name for name in loaded_by("import tentalis") if name.startswith("tentalis")} == {"tentalis"}
    assert not {"torch", "transformers", "faust"} & loaded_by("import tentalis; tentalis.learn")
