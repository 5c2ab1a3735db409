"""What a watch tells of a run that the guard sends back."""

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tentalis.demo.watch import MOST_SETBACKS, RunFailed, RunWatch
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, ack, manifest, promotion, update


def test_each_rollback_is_told_once_and_a_run_that_comes_no_further_ends() -> None:
    told: list[str] = []
    console = cast(Any, SimpleNamespace(print=lambda text, **_: told.append(text)))
    watch = RunWatch(
        RUN, 3, "chat", "assistant", Settings(), cast(Any, None), console, threading.Event(), {}, "tentalis demo"
    )
    begun = round(1000 * time.time())
    for record in (manifest(steps=3), update(1), promotion(1), ack(1)):
        watch.stats.apply(record, begun)
    for number in range(1, MOST_SETBACKS):
        back = promotion(1, mode="rollback").model_copy(
            update={
                "event_time": begun + 1000 * number,
                "reason": f"assistant@v{number} was refused: it repeats itself",
            }
        )
        watch.stats.apply(back, begun)
        watch.tell_setbacks()
        watch.tell_setbacks()
    assert [text.partition("@v")[2][:1] for text in told] == ["1", "2", "3", "4"]
    watch.stats.apply(back.model_copy(update={"event_time": begun + 9000}), begun)
    with pytest.raises(RunFailed, match=r"5 versions in a row .* because assistant@v4 was refused: .*optimizer.lr"):
        watch.tell_setbacks()
