"""Kills two gateways, their backend and their broker at random under many streams (`make chaos-gateway`).

Every turn that a client saw completed must be on the log exactly once by id, with its question and answer; every other
call must have ended in an error or a broken connection. The last line on stdout is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from confluent_kafka import KafkaException

from schemas import topics
from schemas.records import SessionEvent, Status
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.chaos.fault_schedule import say
from tests.support.fork_server import ForkedProcess
from tests.support.gateway_lab import WORDS, ack
from tests.support.kafka_fixture import ensure_topics, new_broker

ANSWER = "".join(WORDS)
GATEWAYS = ("gateway-0", "gateway-1")
SETTLE_S = 600.0


@dataclass
class Heard:
    """The clients' view: all texts sent, the text of each completed call by id, and counts of how the others ended."""

    asked: set[str] = field(default_factory=set)
    completed: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


@dataclass
class Fleet:
    """The processes, and the kills."""

    broker: EmbeddedBroker
    folder: Path
    ports: dict[str, int]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)

    def start(self, name: str) -> None:
        command = ["-m", "tests.chaos.gateway_backend", str(self.ports["backend"])]
        if name in GATEWAYS:
            command = ["-m", "tentalis.cli", "serve", "gateway", "--gateway-id", name]
            command += ["--server", f"http://127.0.0.1:{self.ports['backend']}", "--policy", "assistant"]
            command += ["--port", str(self.ports[name])]
        more = {"TENTALIS_BOOTSTRAP": self.broker.bootstrap, "TENTALIS_HOME": str(self.folder)}
        self.processes[name] = ForkedProcess(command, os.environ | more, self.folder / f"{name}.log")

    def tend(self) -> None:
        """Restarts the processes that ended, by a kill or by themselves."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.start(name)

    def kill(self, name: str) -> None:
        """Kills a process with SIGKILL; restarts the broker after a pause."""
        say(f"kill -9 {name}")
        self.kills[name] += 1
        if name == "broker":
            self.broker.kill()
            time.sleep(random.uniform(0.5, 5.0))
            self.broker.start()
            self.broker.wait_ready(SETTLE_S)
        else:
            self.processes[name].kill()
            self.processes[name].wait()

    def ready(self, name: str) -> bool:
        path = "readyz" if name in GATEWAYS else "v1/models"
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[name]}/{path}", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while not all(self.ready(name) for name in self.processes):
            self.tend()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after a kill: {[n for n in self.processes if not self.ready(n)]}")
            time.sleep(0.2)

    def spooled(self) -> int:
        return len(list(self.folder.glob("gateway/*/*.record")))

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.broker.stop()


async def _client(number: int, urls: Sequence[str], heard: Heard, stop: threading.Event) -> None:
    """Sends the turns of one session, one call at a time, three quarters of them streamed."""
    chance = random.Random(number)
    turn = 0
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=1)) as http:
        while not stop.is_set():
            turn += 1
            text = f"client {number}, turn {turn}"
            await _call(http, chance.choice(urls), text, chance.random() < 0.75, f"c{number}", heard)


async def _call(http: httpx.AsyncClient, url: str, text: str, stream: bool, session: str, heard: Heard) -> None:
    body = {"model": "assistant", "messages": [{"role": "user", "content": text}], "stream": stream}
    event_id, seen = "", b""
    heard.asked.add(text)
    try:
        headers = {"X-Session-Id": session}
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            event_id = response.headers.get("x-request-id", "")
            async for piece in response.aiter_raw():
                seen += piece
            status = response.status_code
    except httpx.HTTPError as error:
        heard.refused[type(error).__name__] += 1
        await asyncio.sleep(0.2)
        return
    complete = status == 200 and (b"data: [DONE]" in seen if stream else b'"finish_reason":"stop"' in seen)
    if complete and b'"error"' not in seen:
        heard.completed[event_id] = text
    else:
        heard.refused[f"status {status}" if status != 200 else "error event"] += 1
        await asyncio.sleep(0.2)


def _load(streams: int, urls: Sequence[str], heard: Heard, stop: threading.Event) -> threading.Thread:
    async def all_of_them() -> None:
        await asyncio.gather(*(_client(number, urls, heard, stop) for number in range(streams)))

    thread = threading.Thread(target=lambda: asyncio.run(all_of_them()), name="load")
    thread.start()
    return thread


def verify(settings: Settings, heard: Heard) -> dict[str, Any]:
    """Compares the log with the clients' view."""
    codec = make_codec(settings)
    events: dict[str, list[SessionEvent]] = {}
    for stored in read_to_end(settings, topics.SESSIONS):
        event = stored.decode_own(codec)
        assert isinstance(event, SessionEvent)
        events.setdefault(event.session_event_id, []).append(event)
    lost = [event_id for event_id in heard.completed if event_id not in events]
    twice = [event_id for event_id, found in events.items() if len(found) > 1]
    wrong = [
        event_id
        for event_id, text in heard.completed.items()
        if event_id in events
        and (
            events[event_id][0].messages[-1].content != text
            or events[event_id][0].response != ANSWER
            or events[event_id][0].not_trainable
        )
    ]
    # A call whose connection broke after it was recorded may be there once; a call that no client made may not.
    said = Counter(found[0].messages[-1].content for found in events.values() if found[0].status is Status.OK)
    foreign = [text for text, count in said.items() if text not in heard.asked or count > 1]
    failed = sum(found[0].status is Status.FAILED for found in events.values())
    return {"lost": lost, "twice": twice, "wrong": wrong, "foreign": foreign, "events": len(events), "failed": failed}


def run(folder: Path, *, seconds: float, streams: int, seed: int) -> dict[str, Any]:
    """Runs the experiment and returns the report."""
    random.seed(seed)
    taken: list[int] = []
    for _ in range(5):
        taken.append(free_port(avoid=tuple(taken)))
    broker = new_broker(folder / "kafka", taken[0], taken[1])
    fleet = Fleet(broker, folder, dict(zip(("backend", *GATEWAYS), taken[2:], strict=True)))
    heard, stop = Heard(), threading.Event()
    broker.start()
    try:
        broker.wait_ready(SETTLE_S)
        settings = Settings(bootstrap=broker.bootstrap)
        ensure_topics(settings)
        publisher = Publisher(settings, "test", make_codec(settings))
        publisher.send(topics.POLICY_ACKS, ack("assistant", 1))
        publisher.flush()
        for name in ("backend", *GATEWAYS):
            fleet.start(name)
        fleet.wait_ready()
        load = _load(streams, [f"http://127.0.0.1:{fleet.ports[name]}" for name in GATEWAYS], heard, stop)
        try:
            _play(fleet, seconds)
        finally:
            stop.set()
            load.join(120)
        fleet.wait_ready()
        found = _settled(fleet, settings, heard)
    finally:
        fleet.end()
    for kind in ("lost", "twice", "wrong", "foreign"):
        for event_id in found[kind][:10]:
            say(f"{kind}: {event_id} {heard.completed.get(event_id, '')}")
    counts = {kind: len(found[kind]) for kind in ("lost", "twice", "wrong", "foreign")}
    return counts | {
        "completed": len(heard.completed),
        "broken": sum(heard.refused.values()),
        "how": dict(heard.refused),
        "events": found["events"],
        "failed": found["failed"],
        "kills": dict(fleet.kills),
        "streams": streams,
        "seed": seed,
    }


def _play(fleet: Fleet, seconds: float) -> None:
    """Kills the processes in turn at random moments until the time is over, each at least once."""
    began, names = time.monotonic(), ["gateway-0", "broker", "gateway-1", "backend"]
    at = 0
    while time.monotonic() - began < seconds or at < len(names):
        time.sleep(random.uniform(1.0, 4.0))
        fleet.kill(names[at % len(names)])
        fleet.tend()
        at += 1


def _settled(fleet: Fleet, settings: Settings, heard: Heard) -> dict[str, Any]:
    """Reads the log until the spools are empty and nothing is lost, for at most SETTLE_S seconds."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        time.sleep(1.0)
        fleet.tend()
        try:
            found = verify(settings, heard)
        except (NoSuchTopic, TimeoutError, KafkaException) as error:
            say(f"the log cannot be read yet: {error}")
            continue
        if time.monotonic() > deadline or not (fleet.spooled() or found["lost"]):
            return found
        say(f"{fleet.spooled()} records in the spools, {len(found['lost'])} turns missing on the log")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--keep", type=Path, help="folder in which logs and data are kept; default: a temporary one")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="tentalis-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = run(folder, seconds=options.seconds, streams=options.streams, seed=options.seed)
    sound = not any(report[kind] for kind in ("lost", "twice", "wrong", "foreign"))
    if sound and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif not sound:
        say(f"logs and data are in {folder}")
    print(json.dumps(report))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
