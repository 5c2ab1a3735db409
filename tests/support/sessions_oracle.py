"""The sessions once more, written to be obviously right and nothing else: it imports nothing of the first.

It keeps every event that counts, and for every record looks at every session anew. What it returns are plain tuples of
what must be written, in order, and the offsets of the dead letters.
"""

from typing import Any

from schemas.records import Feedback, Forget, Message, Record, Result, SessionEvent, Task
from tentalis.signals.tools import find_failure


def told(record: Record) -> tuple[Any, ...]:
    """Returns a written record in the oracle's form."""
    if isinstance(record, Task):
        return "task", record.metadata["session_event_id"], record.turn_index, record.event_time, record.user_id
    if isinstance(record, Result):
        return "result", record.task.metadata["session_event_id"], record.response_token_ids, record.opened_at
    assert isinstance(record, Feedback) and record.result is not None
    event = record.result.task.metadata["session_event_id"]
    return "feedback", event, record.author, record.text, record.event_time, record.result.opened_at


def talk(event: SessionEvent) -> list[Message]:
    return [message for message in event.messages if message.role != "system"]


class Known:
    """All that is remembered of one session."""

    def __init__(self) -> None:
        self.main: list[tuple[int, SessionEvent]] = []
        self.waiting: tuple[int, int, SessionEvent] | None = None
        self.active = False
        self.last_main = self.last = 0


class Oracle:
    def __init__(self, idle: int, remember: int, forget_ttl: int) -> None:
        self.idle, self.remember, self.forget_ttl = idle, remember, forget_ttl
        self.sessions: dict[tuple[str | None, str], Known] = {}
        self.ids: dict[tuple[str | None, str, str], int] = {}
        self.gone: list[tuple[int, Forget]] = []
        self.now = -(10**18)
        self.written: list[tuple[Any, ...]] = []
        self.dead: list[int] = []

    def fold(self, log: list[tuple[int, int, Record | None]]) -> None:
        for offset, stamp, record in log:
            self.now = max(self.now, stamp)
            self.ids = {name: at for name, at in self.ids.items() if at + self.remember >= self.now}
            self.gone = [(at, request) for at, request in self.gone if at + self.forget_ttl >= self.now]
            over = [
                (known.last_main + self.idle, name)
                for name, known in self.sessions.items()
                if known.active and known.last_main + self.idle < self.now
            ]
            for _, name in sorted(over, key=lambda item: item[0]):
                self.finish(name)
            for name, known in list(self.sessions.items()):
                if not known.active and known.last + self.remember < self.now:
                    del self.sessions[name]
            if record is None:
                self.dead.append(offset)
            elif isinstance(record, Forget):
                self.leave(record)
            elif isinstance(record, SessionEvent):
                self.take(record)

    def leave(self, request: Forget) -> None:
        self.gone.append((self.now, request))
        for (user, session), known in self.sessions.items():
            if known.active and self.meant(request, user, session, known.last_main):
                known.active, known.waiting, known.last = False, None, self.now

    @staticmethod
    def meant(request: Forget, user: str | None, session: str, at: int) -> bool:
        if request.user_id is not None and request.user_id != user:
            return False
        if request.session_id is not None and request.session_id != session:
            return False
        return request.before is None or at < request.before

    def take(self, event: SessionEvent) -> None:
        name = event.user_id, event.session_id
        ident = (*name, event.session_event_id)
        if ident in self.ids:
            return
        self.ids[ident] = self.now
        if any(self.meant(request, *name, self.now) for _, request in self.gone):
            return
        if event.kind.value == "end":
            if name in self.sessions and self.sessions[name].active:
                self.finish(name)
            return
        known = self.sessions.setdefault(name, Known())
        late = False
        if event.turn_type == "main":
            number = len(known.main)
            known.main.append((self.now, event))
            trains = event.not_trainable == ""
            if known.waiting is not None and self.stands_in(event, known.waiting[2]):
                late = True
                if trains:
                    self.start(event, number)
                    self.say(number, self.now, event, self.reply(event, known.waiting[2]))
            else:
                if known.waiting is not None:
                    self.say(*known.waiting, self.reply(known.waiting[2], event))
                known.active, known.last_main, known.waiting = True, self.now, None
                if trains:
                    self.start(event, number)
                    known.waiting = number, self.now, event
        known.last = self.now
        if event.done and known.active and not late:
            self.finish(name)

    def finish(self, name: tuple[str | None, str]) -> None:
        known = self.sessions[name]
        if known.waiting is not None:
            self.say(*known.waiting, None)
        known.active, known.waiting, known.last = False, None, self.now

    def start(self, event: SessionEvent, number: int) -> None:
        self.written.append(("task", event.session_event_id, number, self.now, event.user_id))
        self.written.append(("result", event.session_event_id, event.response_token_ids, self.now))

    def say(self, number: int, at: int, event: SessionEvent, message: Message | None) -> None:
        author, text = ("", "") if message is None else (message.role, message.content)
        self.written.append(("feedback", event.session_event_id, author, text, self.now, at))

    @staticmethod
    def stands_in(event: SessionEvent, later: SessionEvent) -> bool:
        """The later request repeats the event's conversation, and then its answer."""
        mine, theirs = talk(event), talk(later)
        whole = [*mine, Message(role="assistant", content=event.response)]
        return bool(event.response) and theirs[: len(whole)] == whole

    @staticmethod
    def reply(event: SessionEvent, later: SessionEvent) -> Message | None:
        mine, theirs = talk(event), talk(later)
        if len(theirs) <= len(mine) and mine[: len(theirs)] == theirs:
            return None
        goes_on = theirs[: len(mine)] == mine
        spoken = [(i, m) for i, m in enumerate(theirs) if m.role != "assistant" and not (goes_on and i < len(mine))]
        if not spoken:
            return None
        if goes_on:
            answers = [m.content for m in theirs[len(mine) :] if m.role == "assistant"]
            if answers and not (answers[0] in event.response or event.response in answers[0]):
                return None
            first = spoken[0][0]
            ends = [i for i, m in enumerate(theirs) if i > first and m.role == "assistant"]
            replies = theirs[first : min(ends, default=len(theirs))]
            if replies[-1].role == "tool":
                return next((m for m in replies if m.role == "tool" and find_failure(m.content)), replies[-1])
            return replies[-1]
        return spoken[-1][1]
