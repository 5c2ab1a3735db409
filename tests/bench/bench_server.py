"""Tokens per second, time to the first token and memory of the local model server beside other ways to sample.

For each model of BENCH_MODELS (smollm2) and each system of BENCH_SYSTEMS (all that are installed), one after the other
in the same run and alone on the machine: 1, 8 and 32 streams at once, each of BENCH_TOKENS (64) tokens in float32 at
temperature 1, with prompts of 64 and of 512 random tokens (prompts and answers have these lengths in all systems):

- `base`: the model alone,
- `mixed`: two adapters (rank 16, all linear layers) and the base model in one batch, by turns.

Systems: `ours`, `tentalis serve model`; `generate`, transformers' own with PEFT's mixed batches, one batch at a time;
`vllm`, its build for this machine by `tentalis serve vllm` (`make vllm` first); `llamacpp`, a server of the package
xllamacpp (`make test-llama-cpp` installs it) with the model as GGUF in fp16, for Llama models. llama.cpp applies one
adapter at a time to a batch: its streams of `mixed` run as three groups, which it puts in turn.

Figures per case: `tokens_s`, generated tokens per second of all streams from the first request to the last token, and
`first_s`, the median over the streams of the seconds to their first token (None for `generate`). `peak_mb`: the most
memory of the system (PSS). After short runs to warm up, all cases are run BENCH_ROUNDS (3) times in turn; figures are
medians, `rounds` is their number of runs. BENCH_MINUTES (25): the whole takes no more but for the last run of each
system. Each has an equal share, its start included. A run that would probably exceed it is left out; a case without any
run has no figures.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tentalis.inference.models import resolve_model
from tentalis.inference.vllm.command import VllmMissing, find_vllm
from tentalis.local.ports import free_port
from tentalis.service import variables
from tentalis.service.settings import Settings
from tests.bench.lab import log, report, wait_until_ready
from tests.bench.process_tree import descendants, pss_mb
from tests.support import ROOT
from tests.support.inference_lab import make_adapter

STREAMS = (1, 8, 32)
PROMPT_TOKENS = (64, 512)
CONTEXT = 1024
ADAPTERS = ("adapter-a", "adapter-b")
THREADS = os.cpu_count() or 1
WARM_UP_TOKENS = 8
LLAMA_CPP = Path(sys.prefix) / "llama-cpp"


@dataclass(frozen=True)
class Case:
    """A level of load. `names`: the adapter of each stream, None for the base model."""

    kind: str
    prompts: list[list[int]]
    names: list[str | None]

    @property
    def label(self) -> str:
        """Streams, prompt tokens and kind."""
        return f"{len(self.prompts)}x{len(self.prompts[0])} {self.kind}"


@dataclass(frozen=True)
class Sampled:
    """The figures of one run of a case; `first_s` is None where a system does not stream."""

    tokens_s: float
    first_s: float | None


Run = Callable[[Case, int], Sampled]
"""Runs a case with so many tokens per answer."""


@dataclass(frozen=True)
class Place:
    """What every system gets: the model's folder, two adapters, and a folder for its own files."""

    model: Path
    adapters: dict[str, Path]
    folder: Path


def cases(vocabulary: int) -> Iterator[Case]:
    """The cases, with random prompts that have nothing in common."""
    draw = np.random.default_rng(0)
    for length in PROMPT_TOKENS:
        for kind in ("base", "mixed"):
            for streams in STREAMS:
                names = [None if kind == "base" else (*ADAPTERS, None)[n % 3] for n in range(streams)]
                yield Case(kind, draw.integers(1000, vocabulary, (streams, length)).tolist(), names)


def fresh(case: Case, number: int) -> Case:
    """The case with other prompts, so that no server has seen them."""
    moved = (np.array(case.prompts) - 1000 + 7919 * (number + 1)) % (max(map(max, case.prompts)) - 999) + 1000
    return Case(case.kind, moved.tolist(), case.names)


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> float:
    """Reads a stream to its end; returns the time of its first token."""
    first = None
    async with client.stream("POST", url, json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if first is None and line.startswith("data:"):
                first = time.perf_counter()
    assert first is not None
    return first


def sampled(url: str, bodies: Sequence[dict[str, Any]], tokens: int) -> Sampled:
    """Sends all requests at once."""

    async def all_of_them() -> list[float]:
        async with httpx.AsyncClient(timeout=3600, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(_stream(client, url, body) for body in bodies))

    began = time.perf_counter()
    firsts = asyncio.run(all_of_them())
    seconds = time.perf_counter() - began
    return Sampled(len(bodies) * tokens / seconds, statistics.median(firsts) - began)


def openai_runner(url: str, served: str) -> Run:
    """A runner of a server with vLLM's API."""

    def run(case: Case, tokens: int) -> Sampled:
        bodies = [
            {
                "model": name or served,
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 1.0,
                "ignore_eos": True,
                "stream": True,
                "logprobs": 0,
                "return_token_ids": True,
            }
            for prompt, name in zip(case.prompts, case.names, strict=True)
        ]
        return sampled(f"{url}/v1/completions", bodies, tokens)

    return run


@contextmanager
def serve(place: Place, *command: str) -> Iterator[Run]:
    """Runs a command of `tentalis serve` with both adapters."""
    port, output = free_port(), place.folder / "server.log"
    arguments = ["--policy-model", str(place.model), "--port", str(port), "--max-model-len", str(CONTEXT)]
    with output.open("wb") as written:
        child = subprocess.Popen(
            [sys.executable, "-m", "tentalis.cli", "serve", *command, *arguments], stdout=written, stderr=written
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(f"{url}/health", 900, child)
            for name, path in place.adapters.items():
                loaded = httpx.post(
                    f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, timeout=600
                )
                loaded.raise_for_status()
            (served, *_) = [
                each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"] if each["id"] not in ADAPTERS
            ]
            yield openai_runner(url, served)
        except Exception:
            log(output.read_text(encoding="utf-8", errors="replace")[-3000:])
            raise
        finally:
            child.terminate()
            child.wait(60)


@contextmanager
def generate(place: Place) -> Iterator[Run]:
    """Runs transformers' generate in a process."""
    job = {"model": str(place.model), "threads": str(THREADS)}
    job |= {name: str(path) for name, path in place.adapters.items()}
    with _lines("server_generate.py", job, sys.executable, {}) as ask:

        def run(case: Case, tokens: int) -> Sampled:
            names = None if case.kind == "base" else case.names
            answer = ask({"prompts": case.prompts, "adapters": names, "tokens": tokens})
            return Sampled(len(case.prompts) * tokens / answer["seconds"], None)

        yield run


@contextmanager
def llama_cpp(place: Place) -> Iterator[Run]:
    """Runs llama.cpp's server on the model as GGUF in fp16."""
    from tentalis.inference.gguf_adapter import write_gguf_adapter
    from tests.support.hf_gguf import write_gguf_model

    model = write_gguf_model(place.model, place.folder / "model.gguf", half=True)
    adapters = [
        str(write_gguf_adapter(path, place.model, place.folder / f"{name}.gguf", f"{name}@v1").path)
        for name, path in place.adapters.items()
    ]
    job = {"gguf": str(model), "adapters": adapters, "streams": max(STREAMS), "context": CONTEXT, "threads": THREADS}
    with _lines("server_llama_cpp.py", job, sys.executable, {"PYTHONPATH": str(LLAMA_CPP)}, first="url") as url:

        def run(case: Case, tokens: int) -> Sampled:
            bodies = [
                {
                    "prompt": prompt,
                    "n_predict": tokens,
                    "temperature": 1.0,
                    "ignore_eos": True,
                    "stream": True,
                    "cache_prompt": False,
                    "lora": [{"id": n, "scale": float(name == each)} for n, each in enumerate(ADAPTERS)],
                }
                for prompt, name in zip(case.prompts, case.names, strict=True)
            ]
            return sampled(f"{url}/completion", bodies, tokens)

        yield run


@contextmanager
def _lines(
    script: str, job: dict[str, Any], python: str, env: dict[str, str], first: str | None = None
) -> Iterator[Any]:
    """Starts a script that talks in JSON lines. Yields the value `first` of its first line, or a function that asks."""
    command = [python, str(Path(__file__).with_name(script)), json.dumps(job)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | env, cwd=ROOT
    )
    assert child.stdin is not None and child.stdout is not None

    def answer() -> dict[str, Any]:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{script} ended; its error is above")

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        assert child.stdin is not None
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
        return answer()

    try:
        begun = answer()
        yield ask if first is None else begun[first]
    finally:
        child.kill()
        child.wait()


SYSTEMS: dict[str, Callable[[Place], Any]] = {
    "ours": lambda place: serve(place, "model", "--threads", str(THREADS)),
    "generate": generate,
    "vllm": lambda place: serve(place, "vllm", "--threads", str(THREADS), "--dtype", "float32"),
    "llamacpp": llama_cpp,
}


@contextmanager
def watched() -> Iterator[list[float]]:
    """Yields a list whose entry is the most memory (MB) of all processes below this one so far."""
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            peak[0] = max(peak[0], sum(map(pss_mb, descendants(os.getpid()))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def installed(cache: Path) -> list[str]:
    """The systems that this machine has; says what installs the others."""
    missing = {}
    try:
        find_vllm(variables.VLLM.read(), cache)
    except VllmMissing as error:
        missing["vllm"] = str(error)
    if not LLAMA_CPP.exists():
        missing["llamacpp"] = f"There is no xllamacpp in {LLAMA_CPP}: `make test-llama-cpp` installs it."
    for system, reason in missing.items():
        log(f"without {system}: {reason}")
    return [system for system in SYSTEMS if system not in missing]


def measure(system: str, place: Place, vocabulary: int, rounds: int, tokens: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of one system: its peak memory, and tokens_s and first_s by case."""
    deadline = time.monotonic() + seconds
    all_cases = list(cases(vocabulary))
    found: dict[str, list[Sampled]] = {case.label: [] for case in all_cases}
    took: dict[str, float] = {}
    with watched() as peak, SYSTEMS[system](place) as run:
        for case in all_cases:
            if len(case.prompts[0]) == min(PROMPT_TOKENS):
                run(fresh(case, 0), WARM_UP_TOKENS)
        for number in range(1, rounds + 1):
            for case in all_cases:
                began = time.monotonic()
                if began + took.get(case.label, 0) > deadline:
                    log(f"{system} {case.label}: no time for run {number}")
                    continue
                found[case.label].append(run(fresh(case, number), tokens))
                took[case.label] = time.monotonic() - began
                log(f"{system} {case.label}: {found[case.label][-1]}")
    return {label: medians(runs) for label, runs in found.items() if runs} | {"peak_mb": round(peak[0])}


def medians(runs: Sequence[Sampled]) -> dict[str, Any]:
    """Returns the figures of a case from its runs."""
    firsts = [each.first_s for each in runs if each.first_s is not None]
    return {
        "tokens_s": round(statistics.median(each.tokens_s for each in runs), 1),
        "first_s": round(statistics.median(firsts), 2) if firsts else None,
        "rounds": len(runs),
    }


def compare(model: Path, systems: Sequence[str], rounds: int, tokens: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of all systems with one model, and ratios of the first to others with mixed adapters."""
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    with tempfile.TemporaryDirectory() as folder:
        adapters = {
            name: make_adapter(model, Path(folder) / name, seed, r=16, lora_alpha=1)
            for seed, name in enumerate(ADAPTERS)
        }
        found: dict[str, Any] = {
            system: measure(
                system, Place(model, adapters, Path(folder)), vocabulary, rounds, tokens, seconds / len(systems)
            )
            for system in systems
        }
    ratios = {}
    for other in systems[1:]:
        for streams in STREAMS:
            label = f"{streams}x{PROMPT_TOKENS[0]} mixed"
            if label in found[systems[0]] and label in found[other]:
                ratio = found[systems[0]][label]["tokens_s"] / found[other][label]["tokens_s"]
                ratios[f"ratio_{other}_{streams}"] = round(ratio, 2)
    return found | ratios


def main() -> None:
    """Runs the benchmark."""
    rounds, tokens = int(os.environ.get("BENCH_ROUNDS", "3")), int(os.environ.get("BENCH_TOKENS", "64"))
    cache = Settings.from_env().cache
    chosen = os.environ.get("BENCH_SYSTEMS")
    systems = chosen.split(",") if chosen else installed(cache)
    models = os.environ.get("BENCH_MODELS", "smollm2").split(",")
    seconds = 60 * float(os.environ.get("BENCH_MINUTES", "25")) / len(models)
    figures = {name: compare(resolve_model(name, cache), systems, rounds, tokens, seconds) for name in models}
    report(**(figures if len(figures) > 1 else next(iter(figures.values()))), tokens=tokens, threads=THREADS)


if __name__ == "__main__":
    main()
