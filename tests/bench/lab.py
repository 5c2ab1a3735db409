"""Helpers of the benchmarks: a separate broker, input records, processes and their figures."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from schemas.records import (
    Feedback,
    LogprobsMode,
    Message,
    PolicySpan,
    Result,
    Source,
    Status,
    Task,
    Terms,
    Verifier,
    result_id,
)
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.kafka.offsets import committed_offsets
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings

METRIC = re.compile(r"^(\w+)(?:\{.*\})? (\S+)$", re.M)


def log(text: str) -> None:
    """Prints progress on stderr: stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def report(**figures: Any) -> None:
    """Prints the last line on stdout: one JSON object."""
    print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()}), flush=True)


def environment_with(name: str, packages: Sequence[str]) -> str:
    """The interpreter of a separate environment for a compared system, created once per set of pinned packages."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tentalis" / name
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists() or complete.read_text() != " ".join(packages):
        log(f"creating an environment with {packages[0]} in {folder}")
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", str(python), *packages], check=True)
        complete.write_text(" ".join(packages))
    return str(python)


def wait_until_ready(url: str, seconds: float, child: "subprocess.Popen[bytes] | None" = None) -> None:
    """Returns when a server answers with 200. Raises TimeoutError after `seconds`, or when `child`, the server, has
    ended."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline or (child is not None and child.poll() is not None):
            raise TimeoutError(f"{url} is not ready within {seconds:g} s, or its server has ended")
        time.sleep(0.2)


def peak_mib(reset: bool = False) -> float:
    """Peak resident memory of this process since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    """Resident memory of a process now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def metrics_of(port: int) -> dict[str, float]:
    """The metrics of a process, each summed over its labels. Raises OSError if the process does not answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = defaultdict(float)
    for name, value in METRIC.findall(text):
        found[name] += float(value)
    return found


@contextmanager
def own_kafka(lines: dict[str, str] | None = None) -> Iterator[Settings]:
    """Runs a broker with all topics in a temporary folder. `lines`: additional settings of the broker."""
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder) / "kafka", free_port(), free_port(), settings=lines)
        broker.start()
        try:
            broker.wait_ready(60)
            settings = Settings.from_env().model_copy(
                update={"bootstrap": broker.bootstrap, "home": Path(folder) / "home"}
            )
            cli(settings, "topics", "apply", "--yes")
            yield settings
        finally:
            broker.stop()


def environment(settings: Settings) -> dict[str, str]:
    """The environment variables of a command with these settings."""
    return os.environ | {
        "TENTALIS_BOOTSTRAP": settings.require_bootstrap(),
        "TENTALIS_HOME": str(settings.home),
        "TENTALIS_LOG": "WARNING",
    }


def cli(settings: Settings, *arguments: str) -> str:
    """Runs a command to its end and returns its stdout. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-m", "tentalis.cli", *arguments],
        env=environment(settings),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


@contextmanager
def process(settings: Settings, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a command until the block ends."""
    child = subprocess.Popen([sys.executable, "-m", "tentalis.cli", *arguments], env=environment(settings))
    try:
        yield child
    finally:
        child.terminate()
        child.wait(15)


def drained_rate(settings: Settings, group: str, ends: Mapping[str, Mapping[int, int]], timeout: float = 300) -> float:
    """Records per second between the first and the last observed commit of a group that processes a backlog."""
    total = sum(end for parts in ends.values() for end in parts.values())
    first: tuple[float, int] | None = None
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, now = sum(committed_offsets(settings, group, ends).values()), time.monotonic()
        if done and first is None:
            first = (now, done)
        if done >= total:
            if first is None or first[1] >= total:
                raise RuntimeError("the backlog was processed before the first measurement: make it larger")
            return (total - first[1]) / (now - first[0])
        time.sleep(0.1)
    raise TimeoutError(f"{group} did not process {total} records within {timeout:g} s")


def make_task(index: int, n_samples: int = 1, opd: bool = True) -> Task:
    """A task of the assistant scenario."""
    return Task(
        task_id=f"bench-{index}",
        event_time=0,
        policy="bench",
        environment="chat",
        messages=(Message(role="user", content="How do I keep bread fresh for longer?"),),
        n_samples=n_samples,
        verifier=Verifier(name="taste"),
        terms=Terms(rl=Source.RESULT, opd=Source.USER if opd else None),
    )


def make_result(task: Task, sample: int, n_tokens: int = 64) -> Result:
    """A result of n_tokens tokens with log-probs."""
    rng = np.random.default_rng(sample)
    response = int32_bytes(rng.integers(0, 40_000, n_tokens))
    text = "Keep bread in a paper bag at room temperature and freeze what you do not eat soon."
    spans = (PolicySpan(start=0, policy="bench@v0"),)
    return Result(
        result_id=result_id(task.task_id, sample, spans, response, text),
        event_time=0,
        opened_at=0,
        task=task,
        sample_index=sample,
        worker_id="bench",
        status=Status.OK,
        text=text,
        prompt_token_ids=int32_bytes(range(40)),
        response_token_ids=response,
        sampler_logprobs=float32_bytes(-rng.random(n_tokens)),
        logprobs_mode=LogprobsMode.PROCESSED,
        policy_spans=spans,
        finish_reason="stop",
    )


def make_feedback(result: Result) -> Feedback:
    """Feedback without content."""
    return Feedback(
        feedback_id=f"feedback-{result.result_id}",
        event_time=0,
        task_id=result.task.task_id,
        sample_index=result.sample_index,
        source=Source.USER,
        result=result,
    )
