"""Keeps the counts of the day on disk while a gateway runs."""

import asyncio
import logging

from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.http.usage_store import UsageStore

log = logging.getLogger(__name__)

SAVE_EVERY_S = 1.0


class UsageSaver:
    """Restores the counts of the day and saves changes. A disk that takes none is told once, and asked again: until
    then the counts are in memory alone."""

    def __init__(self, usage: KeyUsage, store: UsageStore) -> None:
        self._usage, self._store = usage, store
        self._dropped_before = ""
        self._failing = False

    def restore(self) -> None:
        """Takes over the counts of today. A file that cannot be read is an error in the log, and they begin at zero."""
        try:
            self._usage.restore(self._store.days(self._usage.day))
        except OSError as error:
            log.error("%s. The budgets of today begin again", error)

    async def run(self) -> None:
        """Saves changed counts once a second, until it is cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Saves the counts that have changed, and deletes those of old days."""
        changed, oldest = self._usage.unsaved(), self._usage.oldest_day
        try:
            if changed:
                await asyncio.to_thread(self._store.save, changed)
            if oldest != self._dropped_before:
                await asyncio.to_thread(self._store.drop_before, oldest)
                self._dropped_before = oldest
        except OSError as error:
            self._usage.save_again(changed)
            if not self._failing:
                log.error("%s. A restart would forget them", error)
            self._failing = True
            return
        except asyncio.CancelledError:
            self._usage.save_again(changed)  # the thread may or may not have written them: absolute counts, so again
            raise
        if self._failing:
            log.info("the usage of API keys is saved again")
        self._failing = False
