"""The messages of a refused replay, and of one that could not compare all steps."""

from pathlib import Path
from typing import Any

import pytest

from tentalis.service.settings import Settings
from trainer.data.fetch import BadRollouts, RolloutProblem
from trainer.replay import show as replay_show
from trainer.replay.recording import CannotReplay
from trainer.replay.replay import ReplayStep


@pytest.mark.parametrize(
    ("kinds", "helps"), [(("forgotten",), True), (("missing", "forgotten"), True), (("forgotten", "forged"), False)]
)
def test_the_option_that_helps_is_named_and_only_then(
    kinds: tuple[str, ...], helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BadRollouts([RolloutProblem(kind, "t/0", "why") for kind in kinds])

    monkeypatch.setattr(replay_show, "replay", refuse)
    for emit in (None, print):
        assert replay_show.main(Settings(home=tmp_path), "run", emit=emit) == 1
        said = capsys.readouterr()
        assert ("--allow-missing" in said.err) is helps
        assert all(f"{kind}: t/0: why" in (said.err if emit is None else said.out) for kind in kinds)
        assert emit is not None or not said.out


def test_a_run_that_there_is_not_is_an_error_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CannotReplay("the log has no run nosuch")

    monkeypatch.setattr(replay_show, "replay", refuse)
    assert replay_show.main(Settings(home=tmp_path), "nosuch") == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("the log has no run nosuch\n")


def test_steps_that_were_compared_with_nothing_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    steps = [
        ReplayStep(0, "a", "a", True),
        ReplayStep(1, "b", "x", None),
        ReplayStep(2, "c", "y", None, distance=1e-6),
    ]
    monkeypatch.setattr(replay_show, "replay", lambda *_, **__: steps)
    assert replay_show.main(Settings(home=tmp_path), "run", ranks=2) == 0
    said = capsys.readouterr().out
    assert "within the tolerance" in said and "1 of 3 steps, marked -, were not compared" in said
