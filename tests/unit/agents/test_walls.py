"""The red team against the walls that `test_sandbox_attacks` does not try, and what its command counts as a failure."""

import json
import os
import shutil

import pytest

from tentalis.agents.sandbox import NO_WALL, wall_or_reason
from tests.redteam.__main__ import main
from tests.redteam.known import KNOWN
from tests.redteam.report import ATTACKS, CHEATS, KIND, WallScore
from tests.support import ordinary_user

KINDS = ("reads", "reward and tests", "writes", "kernel", "network", "Unix sockets", "exit codes")
"""Kinds of which `make test` tries each attack: they do not depend on the speed of the machine, and end at once."""
ATTACK = "reads: file beside"


@pytest.mark.timeout(600)
def test_bubblewrap_holds_for_an_ordinary_user(capfd: pytest.CaptureFixture[str]) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("the program bwrap is missing (install the package bubblewrap)")
    arguments = ["--wall", "bubblewrap", *(word for kind in KINDS for word in ("--kind", kind))]
    if os.geteuid() == 0:
        if (reason := ordinary_user.why_not()) is not None:
            pytest.skip(reason)
        arguments.append("--ordinary-user")
    code = main(arguments)
    out, err = capfd.readouterr()
    found = json.loads(out.splitlines()[-1])["bubblewrap"]
    if "missing" in found:
        pytest.skip(found["missing"])
    assert (code, found["unexpected"]) == (0, []), err
    assert found["of"] == sum(attack.kind in KINDS for attack in ATTACKS)


def test_root_is_told_why_it_has_no_bubblewrap() -> None:
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("for root, with bubblewrap")
    assert (
        wall_or_reason("bubblewrap") == "bubblewrap confines commands of ordinary users only, and this process is root"
    )


@pytest.mark.parametrize(
    ("achieved", "unexpected"),
    [
        ({ATTACK: ["won"]}, [ATTACK]),
        ({ATTACK: []}, []),
        ({"reads: existence of a process": ["won"]}, []),
        ({"reads: existence of a process": []}, ["reads: existence of a process"]),
        ({"fork bombs: zombie storm": []}, []),
        ({}, []),
    ],
    ids=["new", "held", "known", "known and held", "held on a slow machine", "not run"],
)
def test_a_new_success_and_an_outdated_one_are_unexpected(
    achieved: dict[str, list[str]], unexpected: list[str]
) -> None:
    assert WallScore("sandlock/0.9.0", achieved).unexpected == unexpected
    assert WallScore(NO_WALL, achieved).unexpected == []


def test_each_known_success_is_an_attack_with_a_reason() -> None:
    ids = {attack.id for attack in ATTACKS} | {f"{KIND}: {cheat}" for cheat in CHEATS}
    for reasons in KNOWN.values():
        assert set(reasons) <= ids and all(reasons.values())
