"""Measures how long the join's state takes to be folded again: `python -m tests.bench.bench_rebuild [TASKS]`.

Prints one JSON line; `equal` is true if the rebuilt state has the digest of the original one. If not, it exits with 1.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from schemas.records import Record
from streams.apps.join.core import JoinLimits
from streams.apps.join.processor import JoinProcessor
from streams.runtime.rebuild import fold_again, state_digest
from tests.support.join_support import CODEC, PARTITION, drive, head, hint, log_of, needed, open_, sample, score


def main(tasks: int) -> int:
    """Folds the halves of `tasks` tasks again and prints the result; the exit code."""
    chance, timed = random.Random(1), list[tuple[int, Record | bytes]]()
    limits = JoinLimits()
    for number in range(tasks):
        task = head(f"task-{number}", 2, deadline_ms=60_000, opd_window_ms=30_000)
        halves: list[Record] = [make(sample(task, index)) for index in range(2) for make in (score, hint)]
        chance.shuffle(halves)
        timed += [(number, record) for record in (open_(task), *halves[: chance.randrange(5)])]
    log, processor = log_of(*timed), JoinProcessor(CODEC, limits)
    state: dict[str, bytes] = {}
    processor.restore(PARTITION, state)
    for at in range(0, len(log), 100):
        for wave in drive(processor.process(PARTITION, log[at : at + 100])).changes:
            for key, value in wave:
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
    began = time.perf_counter()
    again = asyncio.run(fold_again(JoinProcessor(CODEC, limits), PARTITION, iter(log)))
    seconds = time.perf_counter() - began
    equal = state_digest(needed(again, limits)) == state_digest(needed(state, limits))
    found = {"tasks": tasks, "records": len(log), "entries": len(state), "seconds": round(seconds, 1), "equal": equal}
    print(json.dumps(found))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
