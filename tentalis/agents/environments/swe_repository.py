"""The repository of a swe episode: the store that only the worker sees, the agent's copy, and plain trees of files.

The store has the commits that the instance needs. The agent's repository is fetched from it: it has the base commit and
what led to it, and neither later commits, other branches, tags nor reflogs. git never runs on what the agent wrote.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tentalis.agents.environments.swe_instances import SweTask
from tentalis.agents.environments.terminal_task import BadTasks, TaskRefused

BRANCH = "main"
_GIT_S = 600.0
# The owner of the source may be another user, and a commit need not be a branch's.
_CONFIG = "[safe]\n\tdirectory = *\n[uploadpack]\n\tallowAnySHA1InWant = true\n[gc]\n\tauto = 0\n"


def require_git() -> None:
    """Raises BadTasks if this machine has no git."""
    if shutil.which("git") is None:
        raise BadTasks("the environment swe needs the program git: install it where this process runs")


@dataclass(frozen=True, slots=True)
class SweStore:
    """The worker's repository of an episode. `base`: the commit that the agent begins with. `tests`: the commit that
    has the hidden tests, if a commit has them and not the instance's `test_patch`."""

    folder: Path
    base: str
    tests: str | None

    def check_patch(self, patch: str) -> None:
        """Raises TaskRefused if a patch does not fit the base commit."""
        if patch:
            index = self.folder / "index"
            _git(self.folder, "read-tree", self.base, GIT_INDEX_FILE=str(index))
            _git(self.folder, "apply", "--cached", "--check", "-", content=patch, GIT_INDEX_FILE=str(index))
            index.unlink()

    def write_tree(self, commit: str, folder: Path, patch: str = "") -> None:
        """Writes the files of a commit to a new folder, and applies a patch. Raises TaskRefused."""
        folder.mkdir(parents=True)
        variables = {"GIT_INDEX_FILE": str(self.folder / "index"), "GIT_WORK_TREE": str(folder)}
        _git(self.folder, "read-tree", commit, cwd=folder, **variables)
        _git(self.folder, "checkout-index", "--all", "--force", cwd=folder, **variables)
        if patch:
            _git(None, "apply", "--whitespace=nowarn", "-", content=patch, cwd=folder)
        (self.folder / "index").unlink()


def make_store(task: SweTask, folder: Path) -> SweStore:
    """Makes the store of an episode in a new folder. Raises TaskRefused."""
    instance, source = task.instance, task.source.resolve()
    folder.mkdir()
    (folder / "gitconfig").write_text(_CONFIG, encoding="utf-8")
    _git(folder, "init", "--quiet", "--template=")
    wanted = instance.base_commit or f"refs/heads/{instance.instance_id}"
    fetched = "+refs/*:refs/source/*" if source.is_file() else f"{wanted}:refs/base"
    try:
        _git(folder, "fetch", "--quiet", "--no-tags", str(source), fetched)
        name = wanted if instance.base_commit else f"refs/source/heads/{instance.instance_id}"
        base = _git(folder, "rev-parse", "--verify", f"{name if source.is_file() else 'refs/base'}^{{commit}}").strip()
        if instance.base_commit:
            return SweStore(folder, base, None)
        tests = _git(folder, "rev-parse", "--verify", f"{base}^1").strip()
        # The parent of the branch has the tests, and the diff to its own parent is the defect.
        tree = ("commit-tree", f"{base}^{{tree}}", "-m", "The repository")
        return SweStore(folder, _git(folder, *tree).strip(), tests)
    except TaskRefused as error:
        what = f"the commit {wanted}" if instance.base_commit else f"the branch {instance.instance_id} of SWE-smith"
        raise TaskRefused(f"{instance.instance_id}: {source} does not have {what}: {error}") from error


def write_agent_repository(store: SweStore, folder: Path) -> None:
    """Makes the agent's repository with the files of the base commit. Raises TaskRefused."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"GIT_DIR": str(folder / ".git")}
    _git(store.folder, "init", "--quiet", "--template=", f"--initial-branch={BRANCH}", cwd=folder, **variables)
    _git(store.folder, "fetch", "--quiet", "--no-tags", str(store.folder / ".git"), store.base, cwd=folder, **variables)
    _git(store.folder, "reset", "--quiet", "--hard", "FETCH_HEAD", cwd=folder, **variables)
    for name in ("FETCH_HEAD", "ORIG_HEAD"):
        (folder / ".git" / name).unlink(missing_ok=True)
    shutil.rmtree(folder / ".git/logs", ignore_errors=True)


def diff_of_trees(old: Path, new: Path) -> bytes:
    """Returns the difference of two folders side by side as a patch. Raises TaskRefused."""
    assert old.parent == new.parent
    command = ["diff", "--no-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index"]
    done = _ran(None, [*command, "--", old.name, new.name], b"", old.parent, {})
    if done.returncode not in (0, 1):
        raise TaskRefused(f"git diff failed: {_said(done.stderr)}")
    return done.stdout


def apply_difference(patch: bytes, folder: Path) -> None:
    """Makes the changes of a patch from `diff_of_trees` in a plain tree. Raises TaskRefused if it does not fit."""
    if patch:  # its paths begin with the name of a tree
        _git(None, "apply", "-p2", "--whitespace=nowarn", "-", content=patch, cwd=folder)


def _git(
    store: Path | None, *arguments: str, content: str | bytes = "", cwd: Path | None = None, **variables: str
) -> str:
    """Runs git in the worker, with a configuration of its own. Raises TaskRefused."""
    named = {} if store is None else {"GIT_DIR": str(store / ".git"), "GIT_CONFIG_GLOBAL": str(store / "gitconfig")}
    data = content.encode() if isinstance(content, str) else content
    done = _ran(store, list(arguments), data, cwd, named | variables)
    if done.returncode != 0:
        raise TaskRefused(f"git {arguments[0]} failed: {_said(done.stderr)}")
    return done.stdout.decode("utf-8", errors="replace")


def _ran(
    store: Path | None, arguments: list[str], text: bytes, cwd: Path | None, variables: dict[str, str]
) -> "subprocess.CompletedProcess[bytes]":
    where = cwd or store
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "LANG": "C.UTF-8",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CEILING_DIRECTORIES": str(where.resolve().parent) if where is not None else "",
        "GIT_AUTHOR_NAME": "task",
        "GIT_AUTHOR_EMAIL": "task@localhost",
        "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
        "GIT_COMMITTER_NAME": "task",
        "GIT_COMMITTER_EMAIL": "task@localhost",
        "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
        **variables,
    }
    try:
        return subprocess.run(
            ["git", *arguments],
            input=text,
            cwd=where,
            env=environment,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TaskRefused(f"git {arguments[0]} took over {_GIT_S:g} s") from error


def _said(output: bytes) -> str:
    return output.decode("utf-8", errors="replace").strip()[-500:] or "it said nothing"
