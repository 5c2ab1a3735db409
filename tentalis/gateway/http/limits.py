"""Timeouts of client connections: for sending a request's head, and for reading the response."""

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)


def stall_timeout_protocol(header_s: float, stall_s: float) -> type[H11Protocol]:
    """Returns uvicorn's HTTP protocol with two timeouts, which uvicorn lacks: a connection is closed if it has not sent
    a whole request head within `header_s` seconds, or if it does not read response data for `stall_s` seconds."""

    class StallTimeoutProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """See asyncio.Protocol."""
            super().connection_made(transport)
            self._watch_header(True)

        def data_received(self, data: bytes) -> None:
            """See asyncio.Protocol."""
            super().data_received(data)
            self._watch_header(self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))

        def connection_lost(self, exc: Exception | None) -> None:
            """See asyncio.Protocol."""
            self._watch_header(False)
            self._cancel_stall_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            """See asyncio.Protocol."""
            super().pause_writing()
            self._stall_timer = asyncio.get_running_loop().call_later(stall_s, self._abort)

        def resume_writing(self) -> None:
            """See asyncio.Protocol."""
            self._cancel_stall_timer()
            super().resume_writing()

        def _cancel_stall_timer(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def _abort(self) -> None:
            log.info("a client did not read its response within %g s: its connection is closed", stall_s)
            # close() would wait until the client has read the rest.
            self.transport.abort()

        def _watch_header(self, incomplete: bool) -> None:
            if not incomplete and self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            elif incomplete and self._header_timer is None:
                loop: Any = asyncio.get_running_loop()
                self._header_timer = loop.call_later(header_s, self.transport.close)

    return StallTimeoutProtocol
