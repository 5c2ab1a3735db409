"""Sharing the beginnings of sequences."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.inference.prefixes import PrefixFamily, prefix_families

SYSTEM, A, B = list(range(20)), list(range(100, 140)), list(range(200, 230))


def test_a_group_shares_its_prompt_rather_than_what_all_prompts_share() -> None:
    batch = [SYSTEM + A + [1], SYSTEM + B + [2], SYSTEM + A + [3, 4], SYSTEM + B + [5]]
    assert prefix_families(batch, [None] * 4) == [PrefixFamily((0, 2), 60), PrefixFamily((1, 3), 50)]


def test_different_prompts_share_what_they_can() -> None:
    assert prefix_families([[*SYSTEM, 1], [*SYSTEM, 2], [9] * 30], [None] * 3) == [
        PrefixFamily((0, 1), 20),
        PrefixFamily((2,), 0),
    ]


def test_different_adapters_share_nothing() -> None:
    assert sorted(f.length for f in prefix_families([[*SYSTEM, 1], [*SYSTEM, 2]], ["a", "b"])) == [0, 0]


def test_equal_sequences_keep_a_token_of_their_own() -> None:
    assert prefix_families([SYSTEM, SYSTEM], [None] * 2) == [PrefixFamily((0, 1), 19)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.booleans()), max_size=12))
def test_every_sequence_is_in_one_family_that_begins_alike(drawn: list[tuple[int, int, bool]]) -> None:
    batch = [[start] * length + ([7] if tail else []) for start, length, tail in drawn]
    kinds = [None] * len(batch)
    found = prefix_families(batch, kinds)
    assert sorted(place for family in found for place in family.members) == list(range(len(batch)))
    for family in found:
        assert len({tuple(batch[place][: family.length]) for place in family.members}) == 1
        assert family.length == 0 or (len(family.members) > 1 and family.length >= 16)
        assert all(len(batch[place]) > family.length for place in family.members)
