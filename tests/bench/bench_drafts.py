"""CPU time of decoding in the local model server with and without drafted tokens, by turns.

For each text of BENCH_TEXTS (json,code,prose), each temperature of BENCH_TEMPERATURES (0,1) and each number of streams
of BENCH_STREAMS (1,2,4): answers of BENCH_TOKENS (48) tokens with BENCH_DRAFT_TOKENS (4) and without, BENCH_ROUNDS (2)
times. `json` and `code` ask for a change of a text of the prompt, `prose` for a story. The model is BENCH_MODEL
(smollm2) in float32.

The engine has one thread, and its CPU time is counted: other processes change it less than the time of day. Prompts
are not counted. Figures per case: `off_ms` and `on_ms` in which every stream gets a token, the medians over the rounds;
`gain`, the median of off / on of a round, with the least and the most; `steps` per token with drafts; `accepted`, the
share of the drafted tokens that were sampled.
"""

import json
import os
import statistics
import time
from typing import Any

from tentalis.inference.engine import EngineStats, InferenceEngine
from tentalis.inference.models import resolve_model
from tentalis.service.settings import Settings
from tests.bench.lab import log, report
from tests.support.inference_lab import Lab

_CODE = """def load(path):
    rows = []
    with open(path) as file:
        for line in file:
            name, value = line.strip().split(",")
            rows.append({"name": name, "value": int(value)})
    return rows


def total(rows):
    result = 0
    for row in rows:
        result += row["value"]
    return result
"""
_PEOPLE = {"Ann": "Oslo", "Bob": "Paris", "Cid": "Rome", "Dan": "Bonn", "Eve": "Lima", "Fay": "Cairo"}
_JSON = json.dumps(
    [{"id": n, "name": who, "city": city, "active": True} for n, (who, city) in enumerate(_PEOPLE.items())]
)
_HEROES = ("baker", "pilot", "nurse", "fisher", "king", "robot", "teacher", "farmer")
QUESTIONS = {
    "json": [f"Repeat this JSON exactly, with id {n} added at the end:\n{_JSON}" for n in range(8)],
    "code": [
        f"Rename the function total to sum_{n} and repeat the whole file:\n```python\n{_CODE}```" for n in range(8)
    ],
    "prose": [f"Write a short story about a {hero} who goes on a journey." for hero in _HEROES],
}


class TimedEngine(InferenceEngine):
    """Counts the CPU seconds of its decoding steps."""

    decode_cpu_seconds = 0.0

    def _decode(self) -> None:
        began = time.thread_time()
        super()._decode()
        self.decode_cpu_seconds += time.thread_time() - began


def listed(name: str, default: str) -> list[str]:
    """The values of a variable, with commas between them."""
    return os.environ.get(name, default).split(",")


def run(lab: Lab, engine: TimedEngine, prompts: list[list[int]], **params: Any) -> tuple[float, EngineStats]:
    """Returns the CPU milliseconds of decoding in which every stream gets a token, and the counts of this run."""
    engine.stats, engine.decode_cpu_seconds, lab.engine = EngineStats(), 0.0, engine
    lab.generate(prompts, ignore_eos=True, **params)
    return 1000 * engine.decode_cpu_seconds / params["max_tokens"], engine.stats


def main() -> None:
    """Runs the benchmark."""
    rounds, tokens = int(os.environ.get("BENCH_ROUNDS", "2")), int(os.environ.get("BENCH_TOKENS", "48"))
    lab = Lab(resolve_model(os.environ.get("BENCH_MODEL", "smollm2"), Settings.from_env().cache))
    drafts = int(os.environ.get("BENCH_DRAFT_TOKENS", "4"))
    off, on = (TimedEngine(lab.runtime, threads=1, draft_tokens=count, draft_rows=64) for count in (0, drafts))
    figures: dict[str, Any] = {}
    for engine in (off, on):
        engine.start()
    for temperature in map(float, listed("BENCH_TEMPERATURES", "0,1")):
        for kind in listed("BENCH_TEXTS", "json,code,prose"):
            for streams in map(int, listed("BENCH_STREAMS", "1,2,4")):
                times: dict[TimedEngine, list[float]] = {off: [], on: []}
                steps, accepted = [], []
                for number in range(rounds):
                    prompts = [
                        list(
                            lab.runtime.tokenizer.apply_chat_template(
                                [{"role": "user", "content": QUESTIONS[kind][(number + place) % 8]}],
                                add_generation_prompt=True,
                                return_dict=False,
                            )
                        )
                        for place in range(streams)
                    ]
                    for engine in (off, on) if number % 2 else (on, off):
                        asked = {"max_tokens": tokens, "temperature": temperature, "seed": number}
                        spent, stats = run(lab, engine, prompts, **asked)
                        times[engine].append(spent)
                        if engine is on:
                            steps.append(stats.steps / tokens)
                            accepted.append(stats.accepted_tokens / max(1, stats.drafted_tokens))
                gains = [without / with_drafts for without, with_drafts in zip(times[off], times[on], strict=True)]
                label = f"{kind} {streams} at {temperature:g}"
                figures[label] = {
                    "off_ms": round(statistics.median(times[off]), 1),
                    "on_ms": round(statistics.median(times[on]), 1),
                    "gain": [round(each, 2) for each in (statistics.median(gains), min(gains), max(gains))],
                    "steps": round(statistics.median(steps), 2),
                    "accepted": round(statistics.median(accepted), 2),
                }
                log(f"{label}: {figures[label]}, load {os.getloadavg()[0]:.0f}")
    for engine in (off, on):
        engine.stop()
    report(**figures, tokens=tokens, draft_tokens=drafts)


if __name__ == "__main__":
    main()
