"""The benchmark of a rebuilt state fails if the state is another one."""

import json
from itertools import count

import pytest

from tests.bench import bench_rebuild


def test_it_fails_if_the_digests_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_rebuild.main(20) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    other = count()
    monkeypatch.setattr(bench_rebuild, "state_digest", lambda _: str(next(other)))
    assert bench_rebuild.main(20) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False
