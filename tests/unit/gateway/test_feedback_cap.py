"""The number of feedback records that one turn takes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas import topics
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import Keys, Scope, create
from tests.support.bridge_log import MemoryLog, app_over, bridge_over

CAP = 3
Body = Callable[[httpx.AsyncClient, MemoryLog], Awaitable[None]]


def run(body: Body, keys: Keys | None = None) -> None:
    async def main() -> None:
        log = MemoryLog()
        bridge = bridge_over(log, limits=KeyLimits(feedback_per_turn=CAP))
        transport = httpx.ASGITransport(app_over(bridge, keys))
        async with bridge.running(), httpx.AsyncClient(transport=transport, base_url="http://bridge") as client:
            await body(client, log)

    asyncio.run(main())


def thumb(ident: str, task_id: str = "t", **more: Any) -> dict[str, Any]:
    return {"task_id": task_id, "feedback_id": ident, "thumb": "down"} | more


def written(log: MemoryLog) -> list[str]:
    return [record.event_id for record in log.topics.get(topics.FEEDBACK, ())]


def test_a_turn_takes_so_many_and_a_repeated_post_is_none_of_them() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for number in range(CAP):
            assert (await client.post("/v1/feedback", json=thumb(f"f{number}"))).status_code == 201
        refused = await client.post("/v1/feedback", json=thumb("more"))
        assert refused.status_code == 429 and f"{CAP} feedback records" in refused.json()["error"]
        assert (await client.post("/v1/feedback", json=thumb("f0"))).status_code == 201, "a client's retry"
        assert (await client.post("/v1/feedback", json=thumb("f9", task_id="other"))).status_code == 201
        assert written(log) == ["f0", "f1", "f2", "f9"]

    run(body)


@pytest.mark.parametrize("as_traces", [True, False], ids=["in one body of traces", "in posts at the same time"])
def test_feedback_that_comes_at_once_passes_no_more(as_traces: bool) -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        if as_traces:
            said = {"kind": "feedback", "trace_id": "s.1", "recorded_at": 2, "text": "No.", "polarity": -1}
            answer = await client.post(
                "/v1/traces", json={"items": [said | {"feedback_id": f"f{n}"} for n in range(20)]}
            )
            outcomes = [item["status"] == "published" for item in answer.json()["items"]]
        else:
            posts = (client.post("/v1/feedback", json=thumb(f"f{number}")) for number in range(20))
            outcomes = [answer.status_code == 201 for answer in await asyncio.gather(*posts)]
        assert sum(outcomes) == CAP == len(written(log))

    run(body)


def test_what_could_not_be_written_takes_no_place() -> None:
    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        log.away = True
        for number in range(CAP + 1):
            assert (await client.post("/v1/feedback", json=thumb(f"f{number}"))).status_code == 503
        log.away = False
        for number in range(CAP):
            assert (await client.post("/v1/feedback", json=thumb(f"f{number}"))).status_code == 201

    run(body)


def test_a_key_s_own_cap_replaces_that_of_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    caps = {"one": {"feedback_per_turn": 1}, "plain": {}}
    made = {name: create(path, [Scope.FEEDBACK], limits=limits) for name, limits in caps.items()}

    async def body(client: httpx.AsyncClient, log: MemoryLog) -> None:
        for name, most in (("one", 1), ("plain", CAP)):
            headers = {"Authorization": f"Bearer {made[name]}"}
            codes = [
                (await client.post("/v1/feedback", json=thumb(f"{name}{n}", task_id=name), headers=headers)).status_code
                for n in range(CAP + 1)
            ]
            assert codes == [201] * most + [429] * (CAP + 1 - most)

    run(body, Keys(path))
