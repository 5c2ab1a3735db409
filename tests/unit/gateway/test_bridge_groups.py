"""Consumer groups as the bridge asks for them."""

import asyncio
import time

from tentalis.gateway.api.groups import ConsumerGroupView
from tentalis.service.settings import Settings


def test_a_broker_that_is_away_does_not_hold_the_answer_up() -> None:
    """Nobody listens on port 1. Asked twice: who asks next must not wait for whoever failed before."""
    groups = ConsumerGroupView(Settings(bootstrap="127.0.0.1:1"))

    async def looks() -> None:
        for _ in range(2):
            seen, _ = await asyncio.wait_for(groups.latest(), 30)
            assert seen is None
            groups._refresh_at = time.monotonic()

    try:
        asyncio.run(looks())
    finally:
        groups.close()
