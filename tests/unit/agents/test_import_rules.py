"""The rules of imports of the Python tool: what they refuse, and what they say about themselves."""

from pathlib import Path

import pytest

from tentalis.agents.environments.import_rules import ImportRules, import_problem
from tentalis.agents.environments.tools import BadTools, read_tools
from tests.unit.agents.test_toolcall import called, played

ONLY_MATH = ImportRules(allow=("math", "numpy.linalg"))


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("import math\nprint(math.pi)", None),
        ("from math import pi, tau", None),
        ("import numpy.linalg.blas", None),
        ("from numpy.linalg import norm", None),
        ("print('import os')  # import os", None),
        ("def f(:", None),
        ("import os", "os"),
        ("import math, os", "os"),
        ("import os as math", "os"),
        ("import mathematics", "mathematics"),
        ("import numpy", "numpy"),
        ("from numpy import linalg", "numpy"),
        ("def f():\n    if 1:\n        from os import path", "os"),
        ("__import__('os')", "os"),
        ("__import__('math')", None),
        ("import importlib", "importlib"),
        ("x.import_module('os')", "os"),
        ("__import__('o' + 's')", "plain text"),
        ("__import__(name='os')", "plain text"),
        ("f = __import__\nf('os')", "plain text"),
    ],
)
def test_an_allow_list_names_all_that_may_be_imported(code: str, refused: str | None) -> None:
    problem = import_problem(code, ONLY_MATH)
    if refused is None:
        assert problem is None
        return
    assert problem is not None
    expected = "an import must name its module as plain text" if " " in refused else f"the import of {refused} is not"
    assert problem.startswith(expected) and problem.endswith("It may import only math, numpy.linalg.")


def test_a_deny_list_names_what_may_not() -> None:
    rules = ImportRules(deny=("os", "urllib.request"))
    assert import_problem("import os.path", rules) == "the import of os.path is not allowed. " + rules.description
    assert import_problem("from urllib import request", rules) is not None
    assert import_problem("import urllib, oslo", rules) is None
    assert ImportRules(("os",), ("os.path",)).description == "It may import only os, and not os.path."
    assert import_problem("import math", ImportRules(allow=())) is not None


def test_without_rules_nothing_is_refused() -> None:
    assert not ImportRules() and import_problem("import os", ImportRules()) is None and ImportRules().description == ""


def test_code_that_cannot_be_checked_is_refused() -> None:
    assert import_problem("-" * 50_000 + "1", ONLY_MATH) == "the code is nested too deeply to check its imports"


def test_the_rules_of_a_file_are_in_the_prompt_and_refuse_a_call(tmp_path: Path) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("python: {allow_imports: [math], timeout_s: 30, memory_mb: 512}")
    found = read_tools(tools).python
    assert found is not None and found.signature["function"]["description"].endswith("It may import only math.")
    codes = ("import os\nprint(os.getcwd())", "import math\nprint(math.floor(42.5))")
    transitions, score = played(*(called("python", code=code) for code in codes), tools=tools)
    refused, done = (each.tool_calls[0].result for each in transitions)
    assert refused == "error: the import of os is not allowed. It may import only math." and done == "42"
    assert (score["calls"], score["refused_calls"]) == (1.0, 1.0)


def test_the_limits_of_a_file_hold(tmp_path: Path) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("python: {timeout_s: 1.5, memory_mb: 128}")
    codes = ("while True: pass", "x = bytearray(10**9)\nprint('got it')")
    transitions, _ = played(*(called("python", code=code) for code in codes), tools=tools)
    slow, large = (str(each.tool_calls[0].result) for each in transitions)
    assert "limit" in slow and "got it" not in large


@pytest.mark.parametrize(
    "content", ["{allow_imports: [a b]}", "{allow_imports: math}", "{deny: [os]}", "{timeout_s: 0}"]
)
def test_bad_rules_are_refused_at_the_start(tmp_path: Path, content: str) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"python: {content}")
    with pytest.raises(BadTools, match="python"):
        read_tools(tools)
