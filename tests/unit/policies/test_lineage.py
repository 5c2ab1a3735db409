"""Runs that go on from runs: names, versions, and how far two versions are apart."""

from schemas.records import RunManifest
from tentalis.policies.lineage import Lineage, Node
from tests.support.loop_records import manifest


def branch(run: str, first: int, parent: str, step: int) -> RunManifest:
    return manifest(run, first=first).model_copy(update={"parent_run": parent, "parent_step": step})


def family() -> Lineage:
    """v0..v8 are run's steps 0..8; run.1 goes on from run@5 as v9..v12; run.2 from run@2 as v13..; other is v20.."""
    return Lineage(
        [
            manifest("run", first=0),
            branch("run.1", 9, "run", 5),
            branch("run.2", 13, "run", 2),
            manifest("run", first=0),
            manifest("other", first=20),
        ]
    )


def test_a_version_belongs_to_the_run_that_began_last() -> None:
    lineage = family()
    assert [lineage.node(v) for v in (0, 8, 9, 12, 13, 25)] == [
        Node("run", 0),
        Node("run", 8),
        Node("run.1", 0),
        Node("run.1", 3),
        Node("run.2", 0),
        Node("other", 5),
    ]
    assert Lineage([manifest("run", first=3)]).node(2) is None
    assert all(lineage.version(node) == v for v in range(30) if (node := lineage.node(v)) is not None)


def test_staleness_counts_steps_not_numbers() -> None:
    lineage = family()
    assert lineage.staleness(8, 5) == 3
    # A rollback gives the old weights a new number: what they sampled is not older for it.
    assert lineage.staleness(9, 5) == 0
    assert lineage.staleness(11, 4) == 3
    # Through where the ways parted: three steps back to run@5, two on.
    assert lineage.staleness(11, 8) == 5
    assert lineage.staleness(13, 12) == 3 + 3
    assert lineage.staleness(13, 2) == 0
    # Runs that share nothing: as before there were branches.
    assert lineage.staleness(22, 8) == 14
    assert lineage.depth(Node("run.1", 3)) == lineage.own_steps("run", Node("run.1", 3)) == 8


def test_a_family_and_its_youngest_branch() -> None:
    lineage = family()
    assert lineage.path("run.2") == ["run.2", "run"]
    assert lineage.family("run.1") == ["run", "run.1", "run.2"]
    assert (lineage.current("run"), lineage.branch_name("run")) == ("run.2", "run.3")
    assert (lineage.current("other"), lineage.branch_name("other")) == ("other", "other.1")
    # A run that merely has such a name is nobody's branch, but its name is taken.
    named = Lineage([manifest("a", first=0), manifest("a.1", first=3)])
    assert (named.current("a"), named.branch_name("a")) == ("a", "a.2")


def test_a_manifest_that_names_itself_ends_somewhere() -> None:
    lineage = Lineage([branch("a", 0, "b", 1), branch("b", 5, "a", 1)])
    assert lineage.path("a") == ["a", "b"]


def test_a_branch_that_goes_on_from_an_unrelated_run_is_of_both_families() -> None:
    """`second` began anew as v9, and was rolled back to first@5; then `first` was, to second.1@1."""
    lineage = Lineage(
        [
            manifest("first", first=0),
            manifest("second", first=9),
            manifest("third", first=12),
            branch("second.1", 14, "first", 5),
            branch("first.1", 16, "second.1", 1),
        ]
    )
    assert (lineage.current("second"), lineage.current("first")) == ("second.1", "first.1")
    assert [lineage.stem(run) for run in ("first", "second.1", "first.1")] == [None, "second", "first"]
    assert lineage.branches("second") == lineage.branches("second.1") == ["second", "second.1"], "not what it came of"
    for run in ("first", "second", "second.1", "first.1"):
        assert lineage.family(run) == ["first", "second", "second.1", "first.1"]
    assert lineage.family("third") == ["third"]
    assert lineage.depth(Node("second.1", 2)) == 7
    assert lineage.own_steps("second", Node("second.1", 2)) == 2, "without the five of first"
    assert lineage.own_steps("first", Node("first.1", 3)) == lineage.own_steps("first.1", Node("first.1", 3)) == 8
    assert lineage.own_steps("second", Node("first.1", 3)) == 1
    assert lineage.own_steps("second", Node("third", 2)) == 0
    assert lineage.staleness(14, 5) == 0
