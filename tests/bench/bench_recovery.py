"""Recovery of 100,000 open tasks with payload (9 KB each, 1,000 tokens) and 900,000 closed ones, after a kill -9.

join_state.py writes the state to the changelogs. One worker each recovers the same tasks: our join in memory, our join
in RocksDB, and the join with Quix Streams (join_quix.py, RocksDB). The figures are as in bench_growth.py: the time of a
successor with an empty local disk (`empty_`: it reads the whole changelog), and of one on the disk as it was left
(`kept_`), until it has closed an open task in every partition; resident memory and CPU per task of the load folded on
that state before.

`same`: the tasks closed after each recovery have the same digests, so payload and header were restored in all of them.
The exit code is 1 if they have not.

BENCH_TASKS is the number of tasks (1,000,000), a tenth of them open; BENCH_ENGINES (memory,rocksdb,quix).
"""

import os
import subprocess
import sys

from confluent_kafka.admin import AdminClient, NewTopic

from tentalis.kafka.codec import make_codec
from tentalis.kafka.config import client_config
from tests.bench.bench_growth import OPEN_SHARE, Child, Group, filled, on_state
from tests.bench.bench_join import QUIX, ROOT
from tests.bench.join_load import TOKENS
from tests.bench.join_quix_state import HEADERS, changelog_of
from tests.bench.join_state import PARTITIONS, quix_rows
from tests.bench.lab import environment_with, report


class Quix(Group):
    """The join with Quix Streams. It does not report how long it reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.changelog = changelog_of(self.app_id)

    def start(self, number: int = 0) -> Child:
        """Starts its worker."""
        python = environment_with("bench-quix", QUIX)
        where = str(self.folder / str(number))
        command = [python, "-m", "tests.bench.join_quix", self.settings.require_bootstrap(), self.app_id, where]
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})

    def fill(self, open_tasks: int, closed_tasks: int, n_tokens: int) -> None:
        """Writes state to its changelog."""
        topic = NewTopic(self.changelog, num_partitions=PARTITIONS, config={"cleanup.policy": "compact"})
        admin = AdminClient(client_config(self.settings))
        admin.create_topics([topic])[self.changelog].result(30)
        self.write(quix_rows(make_codec(self.settings), open_tasks, closed_tasks, n_tokens), HEADERS)
        self.open_tasks, self.n_tokens = open_tasks, n_tokens

    def read(self) -> dict[str, float]:
        """No figures: Quix Streams does not report its recovery."""
        return {}


def main() -> None:
    tasks = int(os.environ.get("BENCH_TASKS", "1000000"))
    states = os.environ.get("BENCH_ENGINES", "memory,rocksdb,quix").split(",")
    rows, closed, load = {}, [], max(2000, tasks // 50)
    for state in states:
        with filled(load) as settings:
            group = Quix(settings, state) if state == "quix" else Group(settings, state)
            rows[state] = on_state(group, tasks, TOKENS, load)
            closed.append(group.closed)
    # State in memory is never kept: with one recovery less, fewer tasks were closed.
    same = all(digests[key] == other[key] for digests in closed for other in closed for key in digests.keys() & other)
    report(tasks=tasks, open_tasks=tasks // OPEN_SHARE, payload_tokens=TOKENS, **rows, same=same)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
