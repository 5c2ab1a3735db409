"""Writes the repositories and the instances of `swe_tasks`: `python -m tests.support.swe_repositories`.

Each repository has four commits: a README, the package with its defect (the base commit), the correction with its
tests, and a branch of SWE-smith. Authors and times are fixed, so that the commits are the same everywhere.
"""

import json
import os
import shutil
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

from tests.support.swe_packages import PACKAGES, Package

INSTANCES = Path(__file__).parent / "swe_tasks/instances.jsonl"
_VARIABLES = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in {
            "NAME": "A. Developer",
            "EMAIL": "developer@example.org",
            "DATE": "2024-01-01T00:00:00Z",
        }.items()
    },
}


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=os.environ | _VARIABLES, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def write_repository(package: Package, folder: Path) -> dict[str, object]:
    """Writes a repository to a new folder. Returns its instance as SWE-bench has it."""
    name = package.name
    imports = f"import pytest  # noqa\n\nfrom {name} import *  # noqa\n\n\n"
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")

    def commit(message: str, **files: str) -> str:
        for path, text in files.items():
            place = folder / path.replace("__", "/").replace("_dot_", ".")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "--allow-empty", "-m", message)
        return git(folder, "rev-parse", "HEAD").strip()

    module, tests = f"{name}_dot_py", f"tests__test_{name}_dot_py"
    commit("Begin", README=f"{name}\n")
    shown = imports + package.shown
    base = commit("Add the package", **{module: package.defective, tests: shown, "tests__conftest_dot_py": ""})
    correct = commit("Correct it", **{module: package.module, tests: f"{shown}\n\n{package.hidden}"})
    git(folder, "tag", "v1.0")
    smith = f"{name}.{base[:8]}.defect"
    git(folder, "checkout", "-q", "-b", smith)
    commit("Bug patch", **{module: package.defective})
    (folder / f"tests/test_{name}.py").unlink()
    commit("Remove the tests that fail")
    git(folder, "checkout", "-q", "main")
    source, added = (git(folder, "diff", base, correct, "--", path) for path in (f"{name}.py", "tests"))
    return {
        "instance_id": f"small__{name}-1",
        "repo": f"small/{name}",
        "base_commit": base,
        "patch": source,
        "test_patch": added,
        "problem_statement": package.issue,
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(_ids(package, package.hidden)),
        "PASS_TO_PASS": json.dumps(_ids(package, package.shown)),
        "environment_setup_commit": base,
    }


def smith_instance(package: Package, instance: dict[str, object]) -> dict[str, object]:
    """Returns the instance of the same defect as SWE-smith has it."""
    base = str(instance["base_commit"])
    return {
        "instance_id": f"{package.name}.{base[:8]}.defect",
        "repo": f"swesmith/{package.name}",
        "patch": "",
        "FAIL_TO_PASS": _ids(package, package.hidden),
        "PASS_TO_PASS": _ids(package, package.shown),
        "problem_statement": package.issue,
    }


def _ids(package: Package, tests: str) -> list[str]:
    """Returns the ids of tests, with those of parameters."""
    found = []
    values: list[str] = [""]
    for line in tests.splitlines():
        if line.startswith("@pytest.mark.parametrize"):
            rows = eval(line.partition("), ")[2].removesuffix(")"))
            values = [f"[{'-'.join(map(str, row))}]" for row in rows]
        elif line.startswith("def test_"):
            name = line.removeprefix("def ").partition("(")[0]
            found += [f"tests/test_{package.name}.py::{name}{value}" for value in values]
            values = [""]
    return found


def write_python(folder: Path) -> None:
    """Makes a virtual environment with pytest alone: the plugins of a larger one take seconds to load."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in distribution(name).files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), packages / file)


def write_folder(folder: Path, n: int = len(PACKAGES)) -> Path:
    """Writes a folder for `--tasks` with all instances, the repositories of the first `n`, some of them bundles, and
    their Python."""
    (folder / "repos").mkdir(parents=True)
    shutil.copy(INSTANCES, folder / "instances.jsonl")
    write_python(folder / "python")
    (folder / "swe.yaml").write_text("python: python\ntests_s: 120\n")
    for number, package in enumerate(PACKAGES[:n]):
        place = folder / f"repos/small__{package.name}"
        write_repository(package, place)
        if number % 2:
            git(place, "bundle", "create", "-q", f"{place}.bundle", "--all")
            shutil.rmtree(place)
    return folder


def main() -> None:
    """Writes the file of instances again."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = [write_repository(package, Path(folder, package.name)) for package in PACKAGES]
    INSTANCES.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
