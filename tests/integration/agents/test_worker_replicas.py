"""The calls of a worker and the sync of adapters over replicas that are killed: no answer is lost or misnamed."""

import asyncio
import hashlib
import signal
from pathlib import Path

import pytest

from schemas.records import LogprobsMode, PolicyAck, Result, Status
from schemas.tensors import int32_view
from tentalis.agents.workers.answer import Answerer
from tentalis.inference.client import OpenAIClient
from tentalis.inference.replicas import router
from tentalis.inference.replicas.client import ReplicatedClient
from tentalis.local.ports import free_port
from tentalis.policies.core import PolicyLog
from tentalis.policies.served import ServedVersions
from tentalis.policies.sync import AdapterSync, ServerAck
from tentalis.storage.file_cache import FileCache
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.loop_records import T0, promotion, task, update
from tests.support.replica_process import ReplicaProcess, replicas
from tests.support.replica_server import TOKENS, version_of_tokens
from tests.support.worker_lab import policy_calls

SAMPLES, AT_ONCE = 2, 6


class WorkerOfReplicas:
    """A worker's answerer and the sync of its server, with the log between them in memory."""

    def __init__(self, client: ReplicatedClient, folder: Path) -> None:
        self._folder = folder
        self._log, self._served = PolicyLog("local"), ServedVersions("local")
        self._calls = policy_calls(self._served, patience_s=60.0)
        self._answerer = Answerer(client, self._calls, worker_id="w", server_id="local")
        self._sync = AdapterSync(client.replicas, self._log, "local", self._acknowledge, FileCache(folder, 2**20))
        self.acks: list[tuple[int, bool]] = []
        self.results: list[Result] = []
        self._asked = 0

    def _acknowledge(self, ack: ServerAck) -> None:
        assert isinstance(ack, PolicyAck)
        self.acks.append((ack.version, ack.ok))
        self._log.apply(ack, -1)
        self._served.apply(ack)
        self._calls.changed()

    async def promote(self, version: int) -> None:
        folder = self._folder / f"v{version}"
        folder.mkdir()
        (folder / ADAPTER_WEIGHTS).write_bytes(b"weights")
        sha256 = hashlib.sha256(b"weights").hexdigest()
        self._log.apply(update(version, sha256=sha256, location=folder.as_uri()), 2 * version)
        self._log.apply(promotion(version, sha256=sha256), 2 * version + 1)
        await self.sync()

    async def sync(self) -> str:
        await self._sync.round()
        return self._sync.problem

    async def answer(self, tasks: int) -> None:
        """Answers tasks, several at a time."""
        at_once = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with at_once:
                self.results += await self._answerer.answer(task(f"task-{number}", n=SAMPLES), T0)

        numbers = range(self._asked, self._asked + tasks)
        self._asked += tasks
        await asyncio.gather(*map(one, numbers))


def check(results: list[Result]) -> None:
    """Every result is an answer that can be trained on, under the version that sampled its tokens."""
    for result in results:
        tokens = int32_view(result.response_token_ids).tolist()
        assert (result.status, len(tokens), result.logprobs_mode) == (Status.OK, TOKENS, LogprobsMode.PROCESSED)
        assert {span.policy for span in result.policy_spans} == {f"assistant@v{v}" for v in version_of_tokens(tokens)}


async def killed_in_turns(servers: list[ReplicaProcess], folder: Path) -> None:
    first, second = servers
    async with ReplicatedClient([OpenAIClient(each.url, timeout=30) for each in servers]) as client:
        worker = WorkerOfReplicas(client, folder)
        await worker.promote(1)
        await worker.answer(10)
        running = asyncio.create_task(worker.answer(30))
        await asyncio.sleep(0.1)
        first.end(signal.SIGKILL)
        await running
        check(worker.results)
        assert len(worker.results) == 40 * SAMPLES
        # A version is promoted while a replica is away: the other one serves it.
        await worker.promote(2)
        assert worker.acks == [(1, True), (2, True)]
        assert (await worker.sync()).startswith(f"the replica {first.url} does not answer: ")
        await worker.answer(10)
        # It is back without adapters, then gets them; then the other one dies in the midst of calls.
        await asyncio.to_thread(first.start)
        await worker.answer(10)
        assert await worker.sync() == ""
        running = asyncio.create_task(worker.answer(30))
        await asyncio.sleep(0.1)
        second.end(signal.SIGKILL)
        await running
        check(worker.results)
        assert [len(worker.results), worker.acks] == [90 * SAMPLES, [(1, True), (2, True)]]
        later = worker.results[40 * SAMPLES :]
        assert {result.policy_spans[0].policy for result in later} == {"assistant@v2"}
        assert client.router.repeats and all(each.in_flight == 0 for each in client.router.health().values())
        asked = {url for (url, outcome), count in client.router.outcomes.items() if outcome == "ok" and count}
        assert asked == {first.url, second.url}


def test_replicas_are_killed_in_turns_while_a_worker_answers_and_a_version_is_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "PROBE_INTERVAL_S", 0.2)
    ports = [free_port()]
    ports.append(free_port(ports))
    with replicas(ports) as servers:
        asyncio.run(asyncio.wait_for(killed_in_turns(servers, tmp_path), 120))
