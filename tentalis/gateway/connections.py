"""How long a connection may take to say what it wants, and to take what it is sent."""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)


def impatient(header_s: float, stall_s: float) -> type[H11Protocol]:
    """uvicorn's protocol, but a connection is closed that has not sent the whole head of a request within `header_s`
    seconds, or that leaves what it is sent lying for `stall_s`: uvicorn itself would keep both for ever."""

    class Impatient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """See asyncio.Protocol."""
            super().connection_made(transport)
            self._watch(True)

        def data_received(self, data: bytes) -> None:
            """See asyncio.Protocol."""
            super().data_received(data)
            self._watch(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

        def connection_lost(self, exc: Exception | None) -> None:
            """See asyncio.Protocol."""
            self._watch(False)
            self._taken()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """See asyncio.Protocol."""
            super().pause_writing()
            self._stall = asyncio.get_running_loop().call_later(stall_s, self._give_up)

        def resume_writing(self) -> None:
            """See asyncio.Protocol."""
            self._taken()
            super().resume_writing()

        def _taken(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        def _give_up(self) -> None:
            log.info("a client did not take what it was sent within %g s: its connection is closed", stall_s)
            # To close it would be to wait until the client has taken the rest.
            self.transport.abort()

        def _watch(self, incomplete: bool) -> None:
            if not incomplete and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif incomplete and self._timer is None:
                loop: Any = asyncio.get_running_loop()
                self._timer = loop.call_later(header_s, self.transport.close)

    return Impatient
