"""Recovery of 100,000 open tasks with payload (9 KB each, 1,000 tokens) and 900,000 closed ones, after a kill -9.

The state is written to the changelog by join_state.py, one broker and one worker, in memory and in RocksDB: what a
successor on an empty disk needs (`empty_`), and one on the disk as it was left (`kept_`), named as in bench_growth.py;
resident memory and CPU per task of the load that was folded on that state before.

BENCH_TASKS is the number of tasks (1,000,000), a tenth of them open.
"""

import os

from tests.bench.bench_growth import OPEN_SHARE, by_state
from tests.bench.join_load import TOKENS
from tests.bench.lab import report


def main() -> None:
    tasks = int(os.environ.get("BENCH_TASKS", "1000000"))
    found = by_state([tasks], TOKENS, max(2000, tasks // 50))
    rows = {state: sizes[str(tasks)] for state, sizes in found.items()}
    report(tasks=tasks, open_tasks=tasks // OPEN_SHARE, payload_tokens=TOKENS, **rows)


if __name__ == "__main__":
    main()
