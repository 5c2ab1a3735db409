"""Silence counts only while the supervisor was awake; a heart's file tells that it beats, and what is wrong."""

import errno
from pathlib import Path

import pytest

from tentalis.local.liveness import AwakeClock, Silence
from tentalis.service.heartbeat import INTERVAL_S, VARIABLE, Beats, Heart


def test_time_asleep_does_not_count_as_silence() -> None:
    clock = AwakeClock(1000.0)
    silence = Silence(clock.now)
    for tick in range(1, 21):
        clock.tick(1000.0 + tick / 2)
    assert silence.seconds(clock.now) == pytest.approx(10.0)
    clock.tick(1010.0 + 8 * 3600)
    assert silence.seconds(clock.now) < 13
    silence.heard(clock.now)
    clock.tick(1010.5 + 8 * 3600)
    assert silence.seconds(clock.now) == pytest.approx(0.5)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("tentalis.service.heartbeat.time.monotonic", lambda: now[0])
    return now


def test_a_heart_is_heard_while_it_beats(tmp_path: Path, now: list[float]) -> None:
    beats, heart = Beats(tmp_path / "worker"), Heart({VARIABLE: str(tmp_path / "worker")})
    beats.clear()
    assert beats.trouble() is None and beats.silent() == []
    heart.beat()
    assert beats.trouble() == ""
    assert beats.silent() == []
    assert beats.silent() == ["0"]
    heart.beat()  # too soon to be worth a system call
    assert beats.silent() == ["0"]
    now[0] += INTERVAL_S
    heart.beat()
    assert beats.silent() == []
    heart.beat("the server is away")  # news do not wait
    assert beats.trouble() == "the server is away"
    heart.beat()
    assert beats.trouble() == ""


def test_a_rank_without_heartbeats_is_named(tmp_path: Path, now: list[float]) -> None:
    beats = Beats(tmp_path)
    hearts = [Heart({VARIABLE: str(tmp_path), "RANK": str(rank)}) for rank in range(2)]
    for heart in hearts:
        heart.beat()
    assert beats.silent() == []
    now[0] += INTERVAL_S
    hearts[0].beat()
    assert beats.silent() == ["1"]
    beats.clear()
    assert beats.trouble() is None and beats.silent() == []


def test_a_heart_beats_on_a_full_disk(tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    beats, heart = Beats(tmp_path), Heart({VARIABLE: str(tmp_path)})
    heart.beat()
    beats.silent()

    def full(self: Path, text: str, encoding: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        heart.beat("words")
        assert beats.silent() == [] and beats.trouble() == ""
    now[0] += INTERVAL_S
    heart.beat("words")
    assert beats.trouble() == "words"


def test_without_a_supervisor_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Heart({"RANK": "1"}).beat("trouble")
    assert list(tmp_path.iterdir()) == []
