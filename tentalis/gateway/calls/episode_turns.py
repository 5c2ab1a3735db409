"""Counts the calls of each episode of a program, and refuses those beyond its turns."""

import time
from collections.abc import Callable

from tentalis.gateway.http.errors import APIError
from tentalis.inference.episode_key import CLOCK_SLACK_S, EpisodeGrant

_CLEAN_EVERY_S = 60.0


class EpisodeTurns:
    """The calls of the episodes whose keys are valid. Each gateway counts its own. `now`: seconds since the epoch."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._taken: dict[str, tuple[int, float]] = {}
        self._clean_at = 0.0

    def take(self, grant: EpisodeGrant) -> None:
        """Counts a call. Raises APIError (403, which no client tries again) if the turns of the episode are used up."""
        if grant.max_turns is None:
            return
        self._clean()
        taken, _ = self._taken.get(grant.session_id, (0, 0.0))
        if taken >= grant.max_turns:
            raise APIError(
                403,
                f"the {grant.max_turns} turns of this episode are used up (max_turns): end the program",
                "permission_error",
            )
        self._taken[grant.session_id] = taken + 1, grant.expires + CLOCK_SLACK_S

    def _clean(self) -> None:
        """Forgets the episodes whose keys have expired."""
        now = self._now()
        if now >= self._clean_at:
            self._clean_at = now + _CLEAN_EVERY_S
            self._taken = {name: found for name, found in self._taken.items() if found[1] >= now}
