"""Which tokens are drafted from a sequence."""

import pytest

from tentalis.inference.drafting import NgramDrafter


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 4, [4, 5, 6, 9]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, [5]),  # the latest place
        ([9, 2, 3, 7, 8, 2, 3], 2, [7, 8]),  # two tokens, where three are nowhere
        ([1, 2, 3, 7, 4, 2, 3, 8, 1, 2, 3], 1, [7]),  # three tokens before two
        ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a repetition goes on
        ([6, 6, 6], 3, [6, 6, 6]),
        ([1, 2, 3, 4, 3], 4, []),  # one token alone
        ([1, 2, 1, 2], 0, []),
        ([1, 2, 1, 2], -1, []),
        ([1], 4, []),
    ],
)
def test_what_followed_the_last_tokens_before(tokens: list[int], most: int, expected: list[int]) -> None:
    assert NgramDrafter(tokens, 0).draft(most) == expected


def test_tokens_of_the_answer_count() -> None:
    drafter = NgramDrafter([1, 2, 3, 4], 2)
    for token in (1, 2):
        drafter.append(token)
    assert drafter.draft(2) == [3, 4]
