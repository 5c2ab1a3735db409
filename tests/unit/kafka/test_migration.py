"""The classes of topic changes: safe, to be decided by a person, refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.kafka.admin import Change, ChangeKind
from tentalis.kafka.migration import LIMITS, Risk, dangers, of_risk, risk_of


def update(**config: tuple[str | None, str]) -> Change:
    return Change(ChangeKind.UPDATE, "t", 1, {name.replace("_", "."): values for name, values in config.items()})


@pytest.mark.parametrize(
    ("config", "risk"),
    [
        ({"retention_ms": ("10", "20")}, Risk.SAFE),
        ({"retention_ms": ("20", "10")}, Risk.PERSON),
        ({"retention_ms": ("10", "-1")}, Risk.SAFE),
        ({"retention_ms": ("-1", "10")}, Risk.PERSON),
        ({"retention_ms": (None, "10")}, Risk.PERSON),
        ({"max_message_bytes": ("100", "50")}, Risk.PERSON),
        ({"cleanup_policy": ("compact,delete", "delete, compact")}, Risk.SAFE),
        ({"cleanup_policy": ("compact,delete", "compact")}, Risk.SAFE),
        ({"cleanup_policy": ("compact", "compact,delete")}, Risk.PERSON),
        ({"cleanup_policy": ("delete", "compact")}, Risk.PERSON),
        ({"compression_type": ("gzip", "zstd")}, Risk.SAFE),
        ({"compression_type": ("gzip", "zstd"), "retention_ms": ("20", "10")}, Risk.PERSON),
    ],
)
def test_a_change_needs_a_person_if_records_may_be_lost(config: dict[str, tuple[str | None, str]], risk: Risk) -> None:
    assert risk_of(update(**config)) is risk


def test_new_topics_are_safe_and_other_partition_counts_are_refused() -> None:
    create = Change(ChangeKind.CREATE, "t", 1, {"cleanup.policy": (None, "delete"), "retention.ms": (None, "1")})
    impossible = Change(ChangeKind.IMPOSSIBLE, "u", 8, reason="has 4 partitions")
    assert (risk_of(create), risk_of(impossible)) == (Risk.SAFE, Risk.REFUSED)
    assert of_risk([create, impossible], Risk.SAFE) == [create]


@given(st.sampled_from(sorted(LIMITS)), st.integers(-1, 50), st.integers(-1, 50))
def test_of_a_change_and_its_reverse_at_least_one_needs_a_person(name: str, one: int, other: int) -> None:
    there = Change(ChangeKind.UPDATE, "t", 1, {name: (str(one), str(other))})
    back = Change(ChangeKind.UPDATE, "t", 1, {name: (str(other), str(one))})
    assert (len(dangers(there)) + len(dangers(back)) == 0) is (one == other)
