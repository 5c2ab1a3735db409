"""The gateway's added cost per call, beside LiteLLM's proxy and smg, each in its own environment, in one run.

Streams: the latency that each proxy adds to the backend alone, for the first token and for all tokens, at p50 and p99,
with 1, 16 and 64 concurrent streams. The lateness of a token is its time since the request minus the median time of the
same token from the backend alone. The time between tokens is not measured: it would be 0 for a proxy that holds tokens
back and sends them together. Whole answers: requests per second of CPU time of the proxy. The backend and the proxies
are measured in turn, round by round, so that other load on the machine affects all of them. Ours records every turn on
a separate Kafka before the client receives the end, and requests token ids and log-probs. `off` is ours with
`X-Tentalis-Record: off`: the difference is the price of the record. LiteLLM only forwards, without a database; smg, in
Rust, is the cost of a bare proxy. Bifrost comes as no package: docs/concepts/gateway.md.

The last line on stdout is one JSON object. `ratio_ttfb_p50`: ours/theirs of the added latency to the first token, the
largest over the numbers of streams, theirs being LiteLLM; `ratio_rps`: ours/theirs of requests per second per core;
`price_of_record`: ours with the record, minus ours without, of the same figures.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tentalis.local.ports import free_port
from tests.bench.lab import cpu_seconds, environment_with, log, own_kafka, process, report, wait_until_ready

LITELLM = "litellm[proxy]==1.106.2"
SMG = "smg==1.13.0"
LEVELS = (1, 16, 64)
TOKENS, PAUSE_MS = 32, 10.0
READY_S = 240.0


@dataclass
class Times:
    """Seconds from the request to each token of each stream; `first`: to the first tokens."""

    streams: list[list[float]] = field(default_factory=list)

    @property
    def first(self) -> list[float]:
        return [stream[0] for stream in self.streams]

    @property
    def medians(self) -> list[float]:
        """The median time of the token at each position."""
        return [statistics.median(at) for at in zip(*self.streams, strict=True)]

    def lateness(self, expected: Sequence[float]) -> list[float]:
        """The time of every token minus the expected time of its position."""
        return [at - then for stream in self.streams for at, then in zip(stream, expected, strict=True)]


@dataclass(frozen=True)
class Target:
    """A server under load. `header`: an additional line of the request; `child`: its process, None for the backend."""

    port: int
    model: str
    child: "subprocess.Popen[bytes] | None" = None
    header: str = ""


def _request(port: int, model: str, stream: bool, more: str = "") -> bytes:
    body = json.dumps(
        {"model": model, "stream": stream, "messages": [{"role": "user", "content": "Say a few words about the sea."}]}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return (head + f"{more}Authorization: Bearer sk-bench\r\nContent-Length: {len(body)}\r\n\r\n").encode() + body


async def _one(port: int, request: bytes, times: Times | None, until: float) -> int:
    """Makes calls one after the other on one connection and returns their number. Raises RuntimeError if one fails."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    done = 0
    try:
        while time.perf_counter() < until:
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise RuntimeError(f"port {port} answered {head[:200]!r}")
            lower = head.lower()
            if b"transfer-encoding: chunked" not in lower:
                length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                done += 1
                continue
            arrived: list[float] = []
            while size := int((await reader.readline()).split(b";")[0], 16):
                piece = (await reader.readexactly(size + 2)).count(b'" word"')
                arrived += [time.perf_counter() - began] * piece
            await reader.readexactly(2)
            if len(arrived) != TOKENS:
                raise RuntimeError(f"port {port} sent {len(arrived)} of {TOKENS} tokens")
            if times is not None:
                times.streams.append(arrived)
            done += 1
    finally:
        writer.close()
    return done


async def _load(target: Target, level: int, seconds: float, times: Times | None) -> int:
    request = _request(target.port, target.model, times is not None, target.header)
    until = time.perf_counter() + seconds
    return sum(await asyncio.gather(*(_one(target.port, request, times, until) for _ in range(level))))


def _p(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextmanager
def _backend(port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.bench.gateway_backend", str(port), str(TOKENS), str(PAUSE_MS)]
    child = subprocess.Popen(command)
    try:
        yield
    finally:
        child.kill()
        child.wait()


@contextmanager
def _litellm(python: str, port: int, backend: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs LiteLLM's proxy with one worker (ours has one process), without a database or log."""
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: bench\n"
        f"    litellm_params: {{model: openai/base, api_base: 'http://127.0.0.1:{backend}/v1', api_key: none}}\n"
        "litellm_settings: {telemetry: false, num_retries: 0}\n"
        "general_settings: {master_key: sk-bench}\n"
    )
    command = [str(Path(python).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    env = os.environ | {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env.pop("PYTHONPATH", None)
    with (folder / "litellm.log").open("wb") as sink:
        child = subprocess.Popen(
            [*command, "--port", str(port), "--num_workers", "1"], env=env, stdout=sink, stderr=sink, cwd=folder
        )
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


@contextmanager
def _smg(python: str, port: int, backend: int, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs smg as a proxy to the backend, without retries, records or health checks in the way."""
    command = [str(Path(python).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{backend}", "--log-level", "error", "--disable-retries"]
    # Its metrics would listen on all addresses.
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port(avoid=(port,)))]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "smg.log").open("wb") as sink:
        child = subprocess.Popen(command, env=env, stdout=sink, stderr=sink, cwd=folder)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=float(os.environ.get("SECONDS_EACH", "8")), help="seconds per measurement"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    python = environment_with("bench-litellm", [LITELLM])
    smg_python = environment_with("bench-smg", [SMG])
    ports: list[int] = []
    for _ in range(4):
        ports.append(free_port(avoid=tuple(ports)))
    backend, ours, theirs, bare = ports
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        settings = held.enter_context(own_kafka())
        held.enter_context(_backend(backend))
        command = ["serve", "gateway", "--server", f"http://127.0.0.1:{backend}", "--policy", "bench"]
        gateway = held.enter_context(process(settings, *command, "--port", str(ours)))
        litellm = held.enter_context(_litellm(python, theirs, backend, folder))
        smg = held.enter_context(_smg(smg_python, bare, backend, folder))
        wait_until_ready(f"http://127.0.0.1:{ours}/readyz", READY_S)
        wait_until_ready(f"http://127.0.0.1:{theirs}/health/liveliness", READY_S)
        wait_until_ready(f"http://127.0.0.1:{bare}/readiness", READY_S)
        who = {
            "alone": Target(backend, "base"),
            "ours": Target(ours, "bench", gateway),
            "off": Target(ours, "bench", gateway, "X-Tentalis-Record: off\r\n"),
            "litellm": Target(theirs, "bench", litellm),
            "smg": Target(bare, "base", smg),
        }
        for name, target in who.items():  # none is measured cold
            log(f"warming up {name}")
            asyncio.run(_load(target, 8, 2.0, Times()))
        times: dict[tuple[str, int], Times] = defaultdict(Times)
        calls: dict[str, int] = defaultdict(int)
        cpu: dict[str, float] = defaultdict(float)
        elapsed: dict[str, float] = defaultdict(float)
        for number in range(options.rounds):
            for level in LEVELS:
                for name, target in who.items():
                    asyncio.run(_load(target, level, options.seconds, times[name, level]))
                log(f"round {number + 1}: {level} streams")
            for name, target in who.items():
                if target.child is None:
                    continue
                before, began = cpu_seconds(target.child.pid), time.perf_counter()
                calls[name] += asyncio.run(_load(target, 64, options.seconds, None))
                elapsed[name] += time.perf_counter() - began
                cpu[name] += cpu_seconds(target.child.pid) - before
    figures: dict[str, dict[str, float]] = {name: {} for name in who if name != "alone"}
    for name, found in figures.items():
        for level in LEVELS:
            alone, proxied = times["alone", level], times[name, level]
            expected = alone.medians
            for label, base, values in (
                ("ttfb", alone.first, proxied.first),
                ("token", alone.lateness(expected), proxied.lateness(expected)),
            ):
                for share in (0.5, 0.99):
                    key = f"added_{label}_ms_p{round(100 * share)}_at_{level}"
                    found[key] = round(_p(values, share) - _p(base, share), 3)
        found["rps_per_core"] = round(calls[name] / cpu[name], 1)
        found["rps"] = round(calls[name] / elapsed[name], 1)
    ratios = {level: _ratio(figures, f"added_ttfb_ms_p50_at_{level}") for level in LEVELS}
    late = {level: _ratio(figures, f"added_token_ms_p50_at_{level}") for level in LEVELS}
    samples = statistics.fmean(len(times["ours", level].first) for level in LEVELS)
    report(
        **figures,
        price_of_record={name: round(value - figures["off"][name], 3) for name, value in figures["ours"].items()},
        ratio_ttfb_p50=max(ratios.values()),
        ratio_ttfb_p50_at=ratios,
        ratio_token_p50_at=late,
        ratio_rps=figures["ours"]["rps_per_core"] / figures["litellm"]["rps_per_core"],
        tokens=TOKENS,
        pause_ms=PAUSE_MS,
        streams_per_level=samples,
        peers=[LITELLM, SMG],
    )


def _ratio(figures: dict[str, dict[str, float]], name: str) -> float:
    return round(figures["ours"][name] / figures["litellm"][name], 3)


if __name__ == "__main__":
    main()
