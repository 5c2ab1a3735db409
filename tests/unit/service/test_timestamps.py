"""Points in time as people write them: one way for `dlq --since`, `consume --from` and `forget --before`."""

import pytest

from tentalis.text.timestamps import parse_moment

NOW = 1_769_860_800_000


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("2026-01-31T12:00:00Z", 0),
        ("2026-01-31T12:00:00", 0),
        ("2026-01-31T13:00:00.250+01:00", -250),
        ("2026-01-31", 43_200_000),
        ("90s", 90_000),
        ("30m", 1_800_000),
        ("1h", 3_600_000),
        ("2d", 172_800_000),
    ],
)
def test_times_and_how_long_ago(text: str, ago: int) -> None:
    assert NOW - parse_moment(text, NOW) == ago


@pytest.mark.parametrize("text", ["soon", "5w", "-1h", "", "1", "٣h", "0001-01-01T00:00:00+14:00x"])
def test_what_is_no_time_is_told_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time: write 2026-01-31T12:00:00Z, or an age: 90s, 30m, 1h, 2d"):
        parse_moment(text, NOW)
