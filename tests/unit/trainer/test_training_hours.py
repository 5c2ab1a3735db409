"""When training is allowed: wrapping midnight, several windows, and the days on which the clock is changed."""

from datetime import UTC, datetime, timedelta

import pytest

from trainer.config.training_hours import TrainingHours


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_without_windows_it_is_always_open() -> None:
    assert TrainingHours.of([], "UTC").open_at(at("2026-05-01T12:00"))


def test_a_window_includes_its_start_and_not_its_end() -> None:
    windows = TrainingHours.of(["02:00-06:00"], "UTC")
    assert [windows.open_at(at(f"2026-05-01T{clock}")) for clock in ("01:59:59", "02:00", "05:59:59", "06:00")] == [
        False,
        True,
        True,
        False,
    ]


def test_several_windows_one_over_midnight() -> None:
    windows = TrainingHours.of(["22:30-01:15", "12:00-13:00"], "UTC")
    hours = ["22:29", "22:30", "00:00", "01:14", "01:15", "12:00", "13:00"]
    assert [windows.open_at(at(f"2026-05-01T{clock}")) for clock in hours] == [
        False,
        True,
        True,
        True,
        False,
        True,
        False,
    ]
    opening = windows.next_opening(at("2026-05-01T13:00"))
    assert opening is not None and opening.isoformat() == "2026-05-01T22:30:00+00:00"
    assert TrainingHours.of(["00:00-24:00"], "UTC").open_at(at("2026-05-01T23:59:59"))
    assert TrainingHours.of(["18:00-24:00"], "UTC").open_at(at("2026-05-01T23:59:59"))
    assert not TrainingHours.of(["18:00-24:00"], "UTC").open_at(at("2026-05-01T00:00"))


def minutes_open(windows: TrainingHours, begin: datetime, hours: int) -> int:
    return sum(windows.open_at(begin + timedelta(minutes=minute)) for minute in range(60 * hours))


def test_daylight_saving_moves_the_window_with_the_wall_clock() -> None:
    windows = TrainingHours.of(["02:00-06:00"], "Europe/Berlin")
    # In winter at 01:00 UTC, in summer at midnight.
    assert windows.open_at(at("2026-01-15T01:00")) and not windows.open_at(at("2026-01-15T00:59"))
    assert windows.open_at(at("2026-07-15T00:00")) and not windows.open_at(at("2026-07-15T04:00"))
    # On 29 March 2026 the clock skips 02:00 to 03:00, on 25 October it has 02:00 to 03:00 twice.
    assert minutes_open(windows, at("2026-03-28T12:00"), 24) == 180
    assert minutes_open(windows, at("2026-10-24T12:00"), 24) == 300


def test_a_window_that_begins_in_the_skipped_hour_opens_when_the_clock_is_past_it() -> None:
    windows = TrainingHours.of(["02:30-06:00"], "Europe/Berlin")
    opening = windows.next_opening(at("2026-03-28T23:00"))
    assert opening is not None and opening.isoformat() == "2026-03-29T03:00:00+02:00"
    # A window that lies in the skipped hour does not open that night, and does the next.
    opening = TrainingHours.of(["02:10-02:50"], "Europe/Berlin").next_opening(at("2026-03-28T23:00"))
    assert opening is not None and opening.isoformat() == "2026-03-30T02:10:00+02:00"


def test_an_open_window_opens_now() -> None:
    windows, now = TrainingHours.of(["02:00-06:00"], "Asia/Kathmandu"), at("2026-05-01T20:15:30")
    assert windows.next_opening(now) == now


@pytest.mark.parametrize(
    ("hours", "zone", "words"),
    [
        ("2-6", "UTC", "not of the form"),
        ("02:00-25:00", "UTC", "no such time"),
        ("24:00-06:00", "UTC", "no such time"),
        ("04:00-04:00", "UTC", "is empty"),
        ("02:00-06:00", "Europe/Berlim", "not an IANA time zone"),
        ("02:00-06:00", "../etc/passwd", "not an IANA time zone"),
    ],
)
def test_what_is_no_window_is_refused_in_words(hours: str, zone: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingHours.of([hours], zone)
