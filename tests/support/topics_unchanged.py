"""Topics that are as they were, for tests of the worker without a broker."""

from collections.abc import Mapping

from streams.runtime.topic_guard import ChangelogReading


class TopicsUnchanged:
    """Stands in for `streams.runtime.topic_guard.TopicGuard`."""

    source_ids: Mapping[str, str] = {}

    async def look(self, partitions: Mapping[str, int]) -> None:
        """There is no broker to ask."""

    async def committed(self, partitions: object) -> dict[tuple[str, int], object]:
        return {}

    async def losses(self, *recorded: object) -> list[object]:
        return []

    def id_records(self, partitions: object) -> list[object]:
        return []

    def lacks_sources(self, reading: ChangelogReading) -> bool:
        return False
