"""The order of processes."""

import pytest

from tentalis.local.spec import ProcessSpec, SupervisorError, depths, in_order, upstream


def spec(name: str, *after: str) -> ProcessSpec:
    return ProcessSpec(name, ["true"], after=after)


STACK = [
    spec("trainer", "topics", "model"),
    spec("model"),
    spec("topics", "kafka"),
    spec("kafka"),
    spec("join", "topics"),
]


def test_what_others_need_comes_first() -> None:
    names = [spec.name for spec in in_order(STACK)]
    assert sorted(names) == ["join", "kafka", "model", "topics", "trainer"]
    for one in STACK:
        assert all(names.index(other) < names.index(one.name) for other in one.after)


def test_upstream_and_depth_follow_the_chain() -> None:
    ordered = in_order(STACK)
    assert upstream(ordered)["trainer"] == {"topics", "model", "kafka"}
    assert upstream(ordered)["kafka"] == frozenset()
    assert depths(ordered) == {"kafka": 0, "model": 0, "topics": 1, "trainer": 2, "join": 2}


@pytest.mark.parametrize(
    "specs", [[spec("a", "b")], [spec("a", "b"), spec("b", "a")], [spec("a", "a")], [spec("a"), spec("a")]]
)
def test_unknown_circular_and_double_names_are_refused(specs: list[ProcessSpec]) -> None:
    with pytest.raises(SupervisorError, match="a"):
        in_order(specs)
