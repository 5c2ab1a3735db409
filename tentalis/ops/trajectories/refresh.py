"""Refreshes the trajectory view: adds the records that were appended to the rollouts topic since the last refresh."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas import topics
from schemas.records import Rollout
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.admin import KafkaAdmin
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.ops.trajectories.rows import row_of
from tentalis.ops.trajectories.view import FORMAT, TrajectoryView, ViewState
from tentalis.service.settings import Settings

ROWS_PER_FILE = 50_000
MOST_FILES = 24
"""Limit of the number of files; more are merged into one."""


@dataclass(slots=True)
class Refreshed:
    """The effects of a refresh. `rebuilt`: the reason why the view was rebuilt, "" if it was not; `unreadable`: the
    records that cannot be decoded, each with its place."""

    added: int = 0
    removed: int = 0
    rebuilt: str = ""
    unreadable: list[str] = field(default_factory=list)


def view_of(settings: Settings) -> TrajectoryView:
    """Returns the trajectory view of the state directory."""
    return TrajectoryView(settings.home / "trajectories")


def refresh(settings: Settings, *, rebuild: bool = False) -> Refreshed:
    """Adds the new rollouts to the view and removes the ones that were forgotten since. `rebuild`: starts from empty.

    If the topic was recreated or lost records at its end, the view is rebuilt. A refresh that is killed leaves the view
    unchanged. Raises the errors of reading the topic.
    """
    view, codec = view_of(settings), make_codec(settings)
    with view.locked():
        view.tidy()
        ends, identity = end_offsets(settings, topics.ROLLOUTS), KafkaAdmin(settings).topic_id(topics.ROLLOUTS)
        state = view.state()
        why = "asked for" if rebuild else _stale(state, identity, ends)
        done = Refreshed(rebuilt=why)
        old = (
            ViewState(format=FORMAT, topic_id=identity, next={}, files=(), forgotten=()) if why or not state else state
        )
        fold = ViewFold(view, done, old.forgotten)
        fold.take(read_to_end(settings, topics.ROLLOUTS, start=old.next, end=ends), codec)
        files = [kept for name in old.files if (kept := view.without(name, fold.gone)) is not None]
        files += fold.files()
        if len(files) > MOST_FILES:
            files = [view.merged(files)]
        new = ViewState(
            format=FORMAT,
            topic_id=identity,
            next=old.next | ends,
            files=tuple(files),
            forgotten=tuple(sorted({*old.forgotten, *fold.gone})),
        )
        if new != state:
            view.replace(new)
        return done


def _stale(state: ViewState | None, identity: str, ends: Mapping[int, int]) -> str:
    """Returns the reason why a view cannot be continued, "" if it can."""
    if state is None:
        return "there was no view"
    if state.topic_id != identity:
        return "the topic was deleted and created again, or this is another cluster"
    if any(ends.get(partition, 0) < offset for partition, offset in state.next.items()):
        return "the topic ends before the offsets that the view has read"
    return ""


class ViewFold:
    """Folds records in log order into files of rows.

    `gone`: keys with a redacted rollout or a tombstone. No record of these keys is a row, before or after it, and
    neither is a record of the keys that earlier refreshes found `forgotten`.
    """

    def __init__(self, view: TrajectoryView, done: Refreshed, forgotten: Collection[str] = ()) -> None:
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
                # A rollout is written only once: the first record of a key counts.
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
        """Returns the files of the folded records, without the keys in `gone`."""
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
    """Reads the record of a row at its offset; None if it is no longer there."""
    codec = make_codec(settings)
    start, end = {partition: offset}, {partition: offset + 1}
    for stored in read_to_end(settings, topics.ROLLOUTS, start=start, end=end):
        record = stored.decode(codec)
        if isinstance(record, Rollout) and record.rollout_id == rollout_id and not record.forgotten:
            return record
    return None
