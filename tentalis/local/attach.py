"""Reads the log of a local installation while its stack is down: starts only the broker, while it is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tentalis.local.broker import EmbeddedBroker
from tentalis.local.state import StateDir
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)


def has_log(settings: Settings) -> bool:
    """Returns True if a local broker has ever used this state directory."""
    return (settings.home / "kafka" / "meta.properties").exists() or any(
        (settings.home / "kafka").glob("*/meta.properties")
    )


@contextmanager
def broker_alone(settings: Settings) -> Iterator[Settings]:
    """Starts the broker on the log of the state directory, yields settings that point to it, then stops it.

    Raises StateDirError if another process holds the directory, BrokerError if the broker does not start.
    """
    with StateDir(settings.home) as state:
        broker = EmbeddedBroker(
            state.folder("kafka"),
            state.port("broker", fixed=True),
            state.port("controller", fixed=True),
            cache=settings.cache,
        )
        log.info("no stack runs: starting the broker on the log in %s", settings.home)
        broker.start()
        try:
            broker.wait_ready(60.0)
            yield settings.model_copy(update={"bootstrap": broker.bootstrap})
        finally:
            broker.stop()
