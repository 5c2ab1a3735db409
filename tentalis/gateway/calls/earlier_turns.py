"""Finds the recorded turn that a response continues: on the log, so also after a restart and for other gateways."""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from schemas.records import EPISODE_TURN, SessionEvent, SessionEventKind, Status
from tentalis.gateway.http.errors import APIError

_PREFIX = "resp_"
_SETTLE_S = 2.0
"""Longest wait for a turn that was just recorded, perhaps by another gateway, to be read back from the log."""
_POLL_S = 0.05


class TurnSource(Protocol):
    """The recorded turns of the last `horizon_s` seconds."""

    @property
    def horizon_s(self) -> float:
        """The age up to which turns are found, in seconds."""
        ...

    @property
    def stale_reason(self) -> str | None:
        """The reason why newer turns may be unknown, None if there is none."""
        ...

    def knows_turn(self, event_id: str) -> bool:
        """True if a turn with this id is known."""
        ...

    async def turn(self, event_id: str) -> SessionEvent | None:
        """The turn with this id; None if the log does not hold it any more. Raises APIError (503)."""
        ...


@dataclass(slots=True)
class EarlierTurns:
    """The turns that responses can continue. `source`: set by what reads the log; None if nothing does."""

    source: TurnSource | None = None

    async def find(
        self, response_id: str, *, namespace: str, user_id: str, session_id: str | None = None
    ) -> SessionEvent:
        """Returns the turn of a response of this user. `session_id`: the only session whose turns are found; None:
        those of all conversations, and of no episode.

        Raises APIError: 400 for a response that cannot be continued, 404 for one that is unknown, expired or another
        user's, 503 while the log cannot be read.
        """
        if self.source is None:
            raise APIError(
                400,
                "previous_response_id: this gateway reads no turns back (its bridge is off): send the whole "
                "conversation as input",
            )
        event_id = response_id.removeprefix(_PREFIX)
        if not await self._known(self.source, event_id):
            raise self._unknown(self.source, response_id)
        turn = await self.source.turn(event_id)
        if turn is None or turn.kind is not SessionEventKind.TURN or not _owned(turn, namespace, user_id, session_id):
            raise self._unknown(self.source, response_id)
        if turn.status is not Status.OK:
            raise APIError(400, f"previous_response_id: {response_id} failed, so nothing can follow it")
        return turn

    async def _known(self, source: TurnSource, event_id: str) -> bool:
        deadline = time.monotonic() + _SETTLE_S
        while not source.knows_turn(event_id):
            if time.monotonic() >= deadline:
                if source.stale_reason is not None:
                    raise APIError(
                        503,
                        f"previous_response_id: the log is not fully read ({source.stale_reason}): try again",
                        "server_error",
                        retry_after_s=2,
                    )
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _unknown(self, source: TurnSource, response_id: str) -> APIError:
        return APIError(
            404,
            f"previous_response_id: you have no response {response_id[:100]!r} of the last "
            f"{source.horizon_s / 3600:g} h; an older one has expired, and a call with X-Tentalis-Record: off is not "
            "kept: send the whole conversation as input",
            "not_found_error",
        )


def _owned(turn: SessionEvent, namespace: str, user_id: str, session_id: str | None) -> bool:
    """True if a turn is this user's, recorded in the caller's own namespace of sessions, or in the one session of an
    episode."""
    if session_id is not None:
        return turn.session_id == session_id and turn.turn_type == EPISODE_TURN
    if turn.turn_type == EPISODE_TURN:
        return False
    return (turn.user_id or "") == user_id and turn.session_id.startswith(f"{namespace}/" if namespace else "")
