"""Namespaces: the names without one, the prefix with one, and what is not allowed."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import topics
from schemas.namespace import BadNamespace, checked, prefix_of
from tentalis.kafka.topology import APPLICATIONS, topic_table
from tests.support import ROOT

NAMES = """
import json
from schemas import topics
from tentalis.kafka.acls import CONSUMERS, FOLLOWERS, READERS, ROLES
from tentalis.kafka.topology import APPLICATIONS, topic_table
print(json.dumps({
    "topics": sorted(topic_table().topics),
    "constants": sorted(v for k, v in vars(topics).items() if k.isupper() and str(v).endswith(".v1")),
    "groups": [*(each.group for each in APPLICATIONS if each.group), READERS, FOLLOWERS, CONSUMERS],
    "app_ids": [each.app_id for each in APPLICATIONS],
    "grants": [g.name for role in ROLES.values() for g in role.grants],
    "principals": [role.principal.removeprefix("User:") for role in ROLES.values()],
}))
"""


def names(namespace: str | None) -> dict[str, list[str]]:
    env = {name: value for name, value in os.environ.items() if name != "TENTALIS_NAMESPACE"}
    env |= {"PYTHONPATH": str(ROOT)} | ({"TENTALIS_NAMESPACE": namespace} if namespace is not None else {})
    done = subprocess.run([sys.executable, "-c", NAMES], env=env, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_without_a_namespace_every_name_is_as_ever() -> None:
    plain = names(None)
    assert plain == names("")
    assert len(plain["constants"]) == 17 and "tentalis.policy-acks.v1" in plain["constants"]
    assert topics.TASKS == "tentalis.tasks.v1"
    assert set(plain["groups"]) == {
        *(f"tentalis-{each.name}" for each in APPLICATIONS if each.group and each.name != "policies"),
        *("tentalis-control", "tentalis-reader", "tentalis-follower", "tentalis-consume"),
    }
    assert "tentalis-join-state-changelog" in plain["topics"] and "tentalis.halves.v1.dlq" in plain["topics"]
    assert all(name.startswith("tentalis") for found in plain.values() for name in found)


def test_a_namespace_is_a_prefix_of_every_name() -> None:
    prefixed, plain = names("team-a.staging"), names(None)
    assert prefixed.keys() == plain.keys()
    for kind, found in plain.items():
        assert sorted(prefixed[kind]) == sorted(f"team-a.staging.{name}" for name in found), kind


def test_this_process_has_the_default_names() -> None:
    assert topics.PREFIX == "tentalis"
    assert set(topics.CONTROL) < set(topic_table().topics)
    assert {each.group for each in APPLICATIONS} >= {"tentalis-join", "tentalis-trainer"}


@pytest.mark.parametrize("bad", ["Staging", "a b", "-a", "a.", "a..b", "a/b", "tentalis", "my.tentalis", "x" * 61, "é"])
def test_a_bad_namespace_is_refused(bad: str) -> None:
    with pytest.raises(BadNamespace, match=r"TENTALIS_NAMESPACE=.*: give 1 to 60 of a-z"):
        prefix_of({"TENTALIS_NAMESPACE": bad})


@given(*[st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True)] * 2)
def test_the_prefix_of_one_namespace_never_covers_another_one(one: str, other: str) -> None:
    try:
        prefixes = {prefix_of({"TENTALIS_NAMESPACE": checked(name)}) for name in (one, other)} | {prefix_of({})}
    except BadNamespace:
        return
    assert not any(a != b and b.startswith(a) for a in prefixes for b in prefixes)


def test_a_command_in_a_bad_namespace_ends_with_2() -> None:
    env = os.environ | {"TENTALIS_NAMESPACE": "Staging", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tentalis.cli", "status"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: TENTALIS_NAMESPACE=Staging: give 1 to 60 of a-z")
    assert "Traceback" not in done.stderr
