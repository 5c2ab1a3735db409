"""The plain installation: which modules and commands work without the packages of the extras."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tentalis.service.packages import EXTRAS, packages_of
from tests.support import ROOT

BLOCKED = sorted({name.replace("-", "_") for extra in EXTRAS for name in packages_of(extra)})

PLAIN = f"""
import importlib, json, pkgutil, sys
import importlib.abc


class NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None


sys.meta_path.insert(0, NotInstalled())
"""

WALK = (
    PLAIN
    + """
failed = {}
for package in map(importlib.import_module, ("schemas", "streams", "tentalis", "trainer")):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                failed[module.name] = error.name.partition(".")[0]
print(json.dumps(failed))
"""
)

COMMANDS = (
    PLAIN
    + """
import contextlib, io
from typer.testing import CliRunner
from tentalis.cli.main import app

done = {}
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    done[" ".join(arguments)] = [result.exit_code, result.stderr]
print(json.dumps(done))
"""
)

COMPUTES = (
    # The model server, but not its client; the trainer and replays, but not their configuration and data.
    "tentalis.inference.",
    "trainer.",
    # Environments that run actions of a model, but not the worker that plays them.
    "tentalis.agents.environments.env_pool",
    "tentalis.agents.environments.gui",
    "tentalis.agents.environments.mcp_",
    "tentalis.agents.environments.openenv.",
    "tentalis.agents.environments.regrading",
    "tentalis.agents.environments.tool",
    "tentalis.agents.pool",
    "tentalis.agents.sandbox.attributes",
    "tentalis.agents.sandbox.sandlock_wall",
    # The comparison of LaTeX answers, but not the verifier that asks for it.
    "tentalis.rewards.latex_equality",
)


def output(program: str, *arguments: str, home: Path) -> Any:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TENTALIS_HOME": str(home), "HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The modules that cannot be imported in a plain installation, with the package that they lack."""
    yield output(WALK, home=tmp_path_factory.mktemp("home"))


def test_only_what_computes_needs_an_extra_to_be_imported(failed: dict[str, str]) -> None:
    assert [name for name in failed if not name.startswith(COMPUTES)] == []
    assert set(failed.values()) == {"torch", "jsonschema", "math_verify", "mcp", "sandlock", "websockets"}
    assert {"tentalis.inference.engine", "trainer.step.step", "trainer.replay.replay"} <= failed.keys()


@pytest.mark.parametrize(
    "module",
    ["tentalis.inference.client", "tentalis.inference.result", "trainer.config.file", "trainer.config.commented"],
)
def test_clients_and_configurations_need_none(module: str, failed: dict[str, str]) -> None:
    assert module not in failed


def test_commands_without_torch(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("{run_id: r, policy: p, base_model: smollm2, base_model_name: m}", encoding="utf-8")
    nowhere = ["--bootstrap-server", "127.0.0.1:1"]
    commands = [
        ["train", "--print-config"],
        ["schemas", "list"],
        ["keys", "list"],
        ["version"],
        ["train", "--config", str(config), *nowhere],
        ["replay", "r", *nowhere],
        ["serve", "model"],
        ["up"],
        ["demo"],
        ["demo", "--scenario", "math"],
    ]
    environments = [["env", "list"], ["env", "try", "toolcall", "What is 6 * 7?"]]
    done = output(COMMANDS, json.dumps([*commands, *environments]), home=tmp_path)
    assert [done[" ".join(each)][0] for each in environments] == [0, 2], done
    assert "pip install '.[environments]'" in done[" ".join(environments[1])][1]
    works, refused = commands[:4], commands[4:]
    assert [done[" ".join(each)][0] for each in works] == [0] * len(works), done
    for each, extras in zip(refused, ("train", "train", "serve", "local,serve,train", *2 * ["local"]), strict=True):
        code, said = done[" ".join(each)]
        (line,) = said.splitlines()
        assert code == 2 and line.startswith("error: `tentalis ") and f"pip install '.[{extras}" in line, said


def test_the_page_on_installing_explains_every_extra() -> None:
    page = (ROOT / "docs" / "operations" / "install.md").read_text("utf-8")
    table = page.partition("| extra | adds | for |")[2].partition("\n\n")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"].keys() - {"dev", "vllm"}  # for developers; explained below it
    cells = [row.split("|")[1] for row in table.strip().splitlines()]
    assert {*re.findall(r"`(\w+)`", " ".join(cells))} == extras
