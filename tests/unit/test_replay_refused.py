"""What a refused replay tells people to do, and what one says that could not compare all."""

from pathlib import Path
from typing import Any

import pytest

from tentalis.config import Settings
from trainer import replay_show
from trainer.fetch import BadRollouts, Problem
from trainer.replay import ReplayStep


@pytest.mark.parametrize(
    ("kinds", "helps"), [(("forgotten",), True), (("missing", "forgotten"), True), (("forgotten", "forged"), False)]
)
def test_the_option_that_helps_is_named_and_only_then(
    kinds: tuple[str, ...], helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BadRollouts([Problem(kind, "t/0", "why") for kind in kinds])

    monkeypatch.setattr(replay_show, "replay", refuse)
    for as_json in (False, True):
        assert replay_show.main(Settings(home=tmp_path), "run", as_json=as_json) == 1
        said = capsys.readouterr()
        assert ("--allow-missing" in said.err) is helps
        assert all(f"{kind}: t/0: why" in said.out for kind in kinds)


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
    assert "within the tolerance" in said and "1 of 3 steps, marked -, were compared with nothing" in said
