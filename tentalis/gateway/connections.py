"""How long a connection may take to say what it wants."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def impatient(header_s: float) -> type[H11Protocol]:
    """uvicorn's protocol, but a connection that has not sent the whole head of a request within `header_s` seconds is
    closed: uvicorn itself would keep it for ever."""

    class Impatient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

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
            super().connection_lost(exc)

        def _watch(self, incomplete: bool) -> None:
            if not incomplete and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif incomplete and self._timer is None:
                loop: Any = asyncio.get_running_loop()
                self._timer = loop.call_later(header_s, self.transport.close)

    return Impatient
