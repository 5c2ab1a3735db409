"""Reads the states of stream applications and writes them as of topics with more partitions: the state's part of
`tentalis.ops.repartition`."""

from collections.abc import Iterable, Iterator, Mapping

from schemas.place import RecordPlace
from streams.runtime.delivery import changelog_record
from streams.runtime.moving import MovableApplication, Move, States
from streams.runtime.processor import applied_offset
from streams.runtime.state import ChangelogFold, Entry, entry_of
from streams.runtime.topic_guard import ChangelogReading, sources_entry
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.topology import Application
from tentalis.ops.repartition.process import StateOffsets, StateRecord
from tentalis.service.settings import Settings


def read_states(settings: Settings, changelog: str) -> States:
    """Returns the states that a changelog holds, by partition; empty ones are left out."""
    folds: dict[int, tuple[ChangelogFold, ChangelogReading]] = {}
    for stored in read_to_end(settings, changelog):
        if stored.partition not in folds:
            fold = ChangelogFold()
            folds[stored.partition] = fold, ChangelogReading(fold)
        place = changelog, stored.partition, stored.offset
        folds[stored.partition][1].add(entry_of(*place, stored.raw_key, stored.value, stored.headers))
    states = {partition: fold.state() for partition, (fold, _) in folds.items()}
    return {partition: state for partition, state in states.items() if state}


class ApplicationStateMover:
    """Moves the state of one application; `module` is its module `moved`."""

    def __init__(self, settings: Settings, application: Application, module: MovableApplication) -> None:
        self.application = application
        self._settings, self._module = settings, module
        (self._changelog,) = application.changelogs
        self._states: States = {}
        self._partitions = 0

    def places(self) -> Iterable[RecordPlace]:
        """Reads the state; returns the records of the inputs that it needs again."""
        self._states = read_states(self._settings, self._changelog)
        self._partitions = len(end_offsets(self._settings, self._changelog))
        return self._module.places(self._states)

    def records(self, partitions: int, offsets: StateOffsets) -> Iterator[StateRecord]:
        """Yields the records of the new changelog. Raises NotMoved."""
        if not self._states:
            return
        move = Move(self._partitions, partitions, offsets.places, offsets.consumed, offsets.begin)
        for partition, state in sorted(self._module.moved(self._states, move).items()):
            for key, value in state.items():
                record = changelog_record(self._changelog, partition, Entry(key, value, applied_offset(value)))
                assert record.key is not None and record.value is not None
                yield partition, record.key, record.value, record.headers

    def sources(self, ids: Mapping[str, str]) -> tuple[bytes, bytes]:
        """Returns key and value of the changelog's record of the ids of the inputs."""
        record = changelog_record(self._changelog, 0, sources_entry(ids))
        assert record.key is not None and record.value is not None
        return record.key, record.value
