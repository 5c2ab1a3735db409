"""The record, in the state directory of a local stack, of the brokers on which it made its topics.

An empty broker looks like a new one. By this record, one that stands in the place of a broker with data is told apart.
Only a stack writes it: another machine, compose and the chart have no such record.
"""

from pathlib import Path
from typing import Any

from tentalis.kafka.preflight import connect
from tentalis.local.state import read_whole, write_whole
from tentalis.service import variables
from tentalis.service.settings import Settings

FILE = "made-topics.json"
_PATIENCE_S = 15.0
_REMEDY = (
    "By this record alone an empty broker is told from yours: check that the broker has your topics (`tentalis topics "
    "list`), then remove this file; `tentalis up` writes it anew"
)


def record_made(settings: Settings, warning: str | None) -> None:
    """Records that this stack has its topics on the broker. Raises Unreachable, KafkaException, OSError.

    Args:
        warning: for the person who starts the stack, of making them; see `warning_of`.
    """
    entry = {"cluster_id": cluster_id(settings), "warning": warning}
    settings.home.mkdir(parents=True, exist_ok=True)
    write_whole(settings.home / FILE, {**_read(settings.home), _place(settings): entry})


def warning_of(settings: Settings) -> str | None:
    """Returns the warning of the last start of the stack on this broker."""
    if settings.bootstrap is None:
        return None
    entry = _read(settings.home).get(_place(settings))
    return None if entry is None else entry["warning"]


def empty_broker(settings: Settings) -> str | None:
    """Describes the loss of all topics of this stack, for a broker that has none of them; None if the stack has made
    none there. Raises Unreachable, KafkaException."""
    entry = _read(settings.home).get(_place(settings))
    if entry is None:
        return None
    before, now = entry["cluster_id"], cluster_id(settings)
    other = "" if before == now else f" (its cluster id was {before} and is {now})"
    return f"Kafka at {settings.bootstrap} has none of the topics that the stack of {settings.home} made there{other}"


def has_made(settings: Settings) -> bool:
    """Returns True if the stack of this state directory has made its topics on this broker, under any of its addresses,
    in this namespace. Raises Unreachable, KafkaException."""
    namespace = variables.NAMESPACE.read() or ""
    own = {entry["cluster_id"] for place, entry in _read(settings.home).items() if place.partition(" ")[2] == namespace}
    return bool(own) and cluster_id(settings) in own


def _place(settings: Settings) -> str:
    """The key of a broker: its address, and the namespace of the topics."""
    return f"{settings.require_bootstrap()} {variables.NAMESPACE.read() or ''}".rstrip()


def cluster_id(settings: Settings) -> str:
    """Returns the id of the cluster that answers. Raises Unreachable, KafkaException."""
    return str(connect(settings).list_topics(timeout=_PATIENCE_S).cluster_id)


def _read(home: Path) -> dict[str, dict[str, Any]]:
    try:
        found: dict[str, dict[str, Any]] = read_whole(home / FILE, _REMEDY)
    except FileNotFoundError:
        return {}
    return found
