"""What a refused replay tells people to do."""

from pathlib import Path
from typing import Any

import pytest

from tentalis.config import Settings
from trainer import replay_show
from trainer.fetch import BadRollouts, Problem


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
