"""Brings the view up to where the topic ends."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import Rollout
from tentalis.admin import KafkaAdmin
from tentalis.config import Settings
from tentalis.kafka import Stored, end_offsets, make_codec, read_to_end
from tentalis.trajectories.rows import row_of
from tentalis.trajectories.view import FORMAT, State, View

ROWS_PER_FILE = 50_000
MOST_FILES = 24
"""More files than this are merged into one."""


@dataclass(slots=True)
class Refreshed:
    """What a refresh did. `rebuilt`: why the view was begun anew; `unreadable`: what is no rollout, with its place."""

    added: int = 0
    removed: int = 0
    rebuilt: str = ""
    unreadable: list[str] = field(default_factory=list)


def view_of(settings: Settings) -> View:
    """The view of a state directory."""
    return View(settings.home / "trajectories")


def refresh(settings: Settings, *, rebuild: bool = False) -> Refreshed:
    """Reads what the view does not hold yet, and takes out of it what was forgotten since. `rebuild`: from nothing.

    A view of a topic that was deleted and made again, or that lost its end, is begun anew. Killed in the middle, the
    view is as it was. Raises what reading the topic raises.
    """
    view, codec = view_of(settings), make_codec(settings)
    with view.locked():
        view.tidy()
        ends, identity = end_offsets(settings, topics.ROLLOUTS), KafkaAdmin(settings).topic_id(topics.ROLLOUTS)
        state = view.state()
        why = "asked for" if rebuild else _stale(state, identity, ends)
        done = Refreshed(rebuilt=why)
        old = State(format=FORMAT, topic_id=identity, next={}, files=(), forgotten=()) if why or not state else state
        fold = Fold(view, done, old.forgotten)
        fold.take(read_to_end(settings, topics.ROLLOUTS, start=old.next, end=ends), codec)
        files = [kept for name in old.files if (kept := view.without(name, fold.gone)) is not None]
        files += fold.files()
        if len(files) > MOST_FILES:
            files = [view.merged(files)]
        new = State(
            format=FORMAT,
            topic_id=identity,
            next=old.next | ends,
            files=tuple(files),
            forgotten=tuple(sorted({*old.forgotten, *fold.gone})),
        )
        if new != state:
            view.replace(new)
        return done


def _stale(state: State | None, identity: str, ends: Mapping[int, int]) -> str:
    """Why a view cannot be gone on with; "" if it can."""
    if state is None:
        return "there was none"
    if state.topic_id != identity:
        return "the topic was deleted and made again, or this is another cluster"
    if any(ends.get(partition, 0) < offset for partition, offset in state.next.items()):
        return "the topic ends before what the view holds"
    return ""


class Fold:
    """Records in log order to files of rows. `gone`: keys of which a husk or a tombstone came; whatever else comes of
    them, before or after, is no row, as it is none of those that were `forgotten` before."""

    def __init__(self, view: View, done: Refreshed, forgotten: Collection[str] = ()) -> None:
        self.gone: set[str] = set()
        self._view, self._done, self._forgotten = view, done, frozenset(forgotten)
        self._rows: dict[str, tuple[Any, ...]] = {}
        self._files: list[str] = []

    def take(self, records: Iterable[Stored], codec: Codec) -> None:
        """Folds records."""
        for stored in records:
            key = stored.key or ""
            if stored.value is None:
                self._remove(key)
                continue
            try:
                record = stored.decode(codec)
            except DecodeError as error:
                self._done.unreadable.append(str(error))
                continue
            if not isinstance(record, Rollout):
                continue
            if record.forgotten:
                self._remove(record.rollout_id)
            elif record.rollout_id not in self.gone and record.rollout_id not in self._forgotten:
                # The first record of a key counts: it is written once.
                self._rows.setdefault(
                    record.rollout_id, row_of(record, stored.partition, stored.offset, stored.timestamp)
                )
                if len(self._rows) >= ROWS_PER_FILE:
                    self._write()

    def _remove(self, key: str) -> None:
        self._rows.pop(key, None)
        if key not in self._forgotten:
            self.gone.add(key)

    def files(self) -> list[str]:
        """The files of all that was taken, without what is gone."""
        self._write()
        kept = [self._view.without(name, self.gone) for name in self._files]
        self._done.removed = len(self.gone)
        return [name for name in kept if name is not None]

    def _write(self) -> None:
        if self._rows:
            self._files.append(self._view.add(list(self._rows.values())))
            self._done.added += len(self._rows)
            self._rows = {}


def record_at(settings: Settings, rollout_id: str, partition: int, offset: int) -> Rollout | None:
    """The record behind a row, read where it lies; None if it is not there any more."""
    codec = make_codec(settings)
    start, end = {partition: offset}, {partition: offset + 1}
    for stored in read_to_end(settings, topics.ROLLOUTS, start=start, end=end):
        record = stored.decode(codec)
        if isinstance(record, Rollout) and record.rollout_id == rollout_id and not record.forgotten:
            return record
    return None
