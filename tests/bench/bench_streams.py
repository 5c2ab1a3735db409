"""Events per second of each stream application (one process each), compared with raw consumption of the same topic in
the same run.

Scoring reads tasks and results, hinting feedback without content (so the teacher is not called), the join the halves
that these two wrote, aggregation the outcomes of the join and the feedback. BENCH_TASKS sets the size (default 20,000
tasks).
"""

import os
import time

from schemas import topics
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.bench.lab import drained_rate, log, make_feedback, make_result, make_task, own_kafka, process, report


def fill(settings: Settings, n_tasks: int) -> None:
    """Sends tasks, results and feedback, one sample per task."""
    publisher = Publisher(settings, "bench", make_codec(settings))
    for index in range(n_tasks):
        task = make_task(index)
        result = make_result(task, 0)
        publisher.send(topics.TASKS, task)
        publisher.send(topics.RESULTS, result)
        publisher.send(topics.FEEDBACK, make_feedback(result))
    publisher.flush(120)


def raw_rate(settings: Settings, topic: str) -> float:
    """Records per second of reading a topic to its end without processing."""
    began = time.perf_counter()
    count = sum(1 for _ in read_to_end(settings, topic))
    return count / (time.perf_counter() - began)


def main() -> None:
    n_tasks = int(os.environ.get("BENCH_TASKS", "20000"))
    figures: dict[str, float] = {}
    with own_kafka() as settings:
        log(f"filling {n_tasks} tasks, results and feedback")
        fill(settings, n_tasks)
        for app, inputs in (
            ("scoring", (topics.TASKS, topics.RESULTS)),
            ("hinting", (topics.FEEDBACK,)),
            ("join", (topics.HALVES,)),
            ("aggregation", (topics.OUTCOMES, topics.FEEDBACK)),
        ):
            ends = {topic: end_offsets(settings, topic) for topic in inputs}
            options = ("--server", "http://127.0.0.1:9") if app == "hinting" else ()
            with process(settings, "serve", app, *options):
                figures[app] = drained_rate(settings, f"tentalis-{app}", ends)
            figures[f"{app}_raw"] = raw_rate(settings, inputs[0])
            log(f"{app}: {figures[app]:,.0f} events/s, raw {figures[f'{app}_raw']:,.0f}/s")
    report(tasks=n_tasks, **figures)


if __name__ == "__main__":
    main()
