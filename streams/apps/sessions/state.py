"""The state of a session, and its encoding on the changelog.

Five kinds of keys; each value begins with its applied offset (8 bytes, see `streams.runtime.processor`):

- `turn/<partition>/<offset>`: the event of a session's last main turn, bytes as received, while it waits for its next
  state. Written once, under a key that is never reused.
- `session/<hash of user and session>`: the header of a session. Rewritten on every change. Once the session has ended
  it holds counts only, no personal data.
- `seen/<hash of the event's id>`: the mark that an event was on the log (`streams.fold.recent_events`).
- `forget/<partition>/<offset>`: a request to forget (`streams.fold.forgotten`).
- `clock/<partition>`: the stream time; its applied offset is the last one that was folded completely
  (`streams.fold.clock`).
"""

import json
from dataclasses import dataclass

from streams.runtime.processor import DamagedState, applied_offset, payload_of, stamped

SESSION, TURN = "session/", "turn/"
VERSION = 1


@dataclass(slots=True)
class Pending:
    """The last main turn, which waits for its next state: offset of its event, stream time (ms) of its arrival, and its
    number in the session. `value` is its state value, empty if that lies on disk; `size` is the size of the event in
    bytes."""

    offset: int
    at: int
    index: int
    value: bytes = b""
    size: int = 0


@dataclass(slots=True)
class SessionState:
    """The state of a session. `since`: stream time (ms) of the last main turn of an open session, else of the end or
    the last event. `requests` counts all turns, `turns` the main turns among them. Session, user and policy are known
    only while the session is open."""

    applied: int
    since: int
    requests: int = 0
    turns: int = 0
    open: bool = False
    session_id: str | None = None
    user_id: str | None = None
    policy: str = ""
    pending: Pending | None = None
    timer: int | None = None
    """The stream time to which a timer was last set; not part of the header."""


def encode_session(session: SessionState) -> bytes:
    """Encodes the header of a session."""
    pending = session.pending
    fields: dict[str, object] = {
        "version": VERSION,
        "since": session.since,
        "requests": session.requests,
        "turns": session.turns,
        "open": session.open,
    }
    if session.open:
        fields |= {"session_id": session.session_id, "user_id": session.user_id, "policy": session.policy}
    if pending is not None:
        fields["pending"] = [pending.offset, pending.at, pending.index]
    return stamped(session.applied, json.dumps(fields, separators=(",", ":")).encode())


def decode_session(value: bytes) -> SessionState:
    """Decodes a session from its header, which does not include the bytes of its pending turn. Raises DamagedState."""
    try:
        fields = json.loads(payload_of(value))
        if fields.pop("version") != VERSION:
            raise DamagedState(
                f"the state has a session header of another version than {VERSION}: run the version that wrote it "
                "until its sessions have ended"
            )
        pending = fields.pop("pending", None)
        found = SessionState(applied_offset(value), **fields)
        found.pending = None if pending is None else Pending(*pending)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedState(f"the state has an invalid session header: {value[:64].hex()}") from error
    return found
