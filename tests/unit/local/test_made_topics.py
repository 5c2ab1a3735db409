"""A local stack tells an empty broker in the place of its own from a new one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tentalis.local import made_topics
from tentalis.local.made_topics import empty_broker, record_made, warning_of
from tentalis.local.state import StateDirError
from tentalis.service import variables
from tentalis.service.settings import Settings

BOOTSTRAP = "127.0.0.1:1"


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The id of the cluster that answers, in a list of one."""
    answering = ["first"]

    def connect(_: Settings) -> Any:
        return SimpleNamespace(list_topics=lambda timeout: SimpleNamespace(cluster_id=answering[0]))

    monkeypatch.setattr(made_topics, "connect", connect)
    return answering


def test_a_broker_on_which_the_stack_made_its_topics_is_known(
    clusters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(bootstrap=BOOTSTRAP, home=tmp_path / "home")
    assert empty_broker(settings) is None, "no stack has worked here"
    record_made(settings, "look")
    assert warning_of(settings) == "look" and "cluster id" not in str(empty_broker(settings))
    clusters[:] = ["second"]
    assert "its cluster id was first and is second" in str(empty_broker(settings))
    record_made(settings, None)
    assert warning_of(settings) is None and "cluster id" not in str(empty_broker(settings))
    elsewhere = settings.model_copy(update={"bootstrap": "127.0.0.1:2"})
    assert empty_broker(elsewhere) is None and warning_of(elsewhere) is None
    record_made(elsewhere, "there")
    assert empty_broker(settings) is not None and warning_of(elsewhere) == "there"
    monkeypatch.setenv(variables.NAMESPACE.name, "staging")
    assert empty_broker(settings) is None, "other topics on the same broker"


def test_a_damaged_record_says_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / made_topics.FILE).write_text("{")
    with pytest.raises(StateDirError, match="check that the broker has your topics"):
        empty_broker(Settings(bootstrap=BOOTSTRAP, home=tmp_path))
