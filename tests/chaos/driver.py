"""Sends the input of the chaos run: tasks whose halves come in random order and late, some twice, some never."""

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from schemas import topics
from schemas.ids import derived_id
from schemas.records import (
    Feedback,
    Forget,
    Hint,
    HintKind,
    LogprobsMode,
    Message,
    Opens,
    Polarity,
    PolicySpan,
    Record,
    Result,
    Sampling,
    Source,
    Status,
    Task,
    Terms,
    Verifier,
    result_id,
    sample_of,
)
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.kafka.codec import make_codec
from tentalis.kafka.errors import DeliveryFailed
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

DEADLINE_MS, WINDOW_MS = 12_000, 3_000
TOKENS = 48
SPANS = (PolicySpan(start=0, policy="assistant@v0"),)
PRAISE = {"polarity": Polarity.POSITIVE, "text": "Thank you!"}
Event = tuple[float, str, Record]
"""(seconds after the task, topic, record)"""


def session_of(run: str, number: int) -> str:
    """The id of one of the run's sessions."""
    return f"{run}-session-{number}"


def leaver_of(run: str) -> str:
    """The id of the user of these sessions."""
    return f"{run}-leaver"


def events_of(chance: random.Random, run: str, number: int, sessions: int = 0) -> Iterator[Event]:
    """Yields one task and all records about it, in no order. With sessions, every fifth task is a turn of one."""
    session = chance.randrange(sessions) if sessions and chance.random() < 0.2 else None
    family = chance.choices(["hinted", "plain", "graded"], [6, 1, 3])[0]
    terms = {
        "hinted": Terms(rl=Source.RESULT, opd=Source.USER, deadline_ms=DEADLINE_MS, opd_window_ms=WINDOW_MS),
        "plain": Terms(rl=Source.RESULT, deadline_ms=DEADLINE_MS, opd_window_ms=WINDOW_MS),
        "graded": Terms(
            rl=Source.USER,
            opens=chance.choice([Opens.AT_ONCE, Opens.FIRST_FEEDBACK]),
            deadline_ms=DEADLINE_MS,
            opd_window_ms=WINDOW_MS,
        ),
    }[family]
    task = Task(
        task_id=f"{run}-{number}",
        event_time=now_ms(),
        policy="assistant",
        environment="chat",
        messages=(Message(role="user", content="Why do cats purr?"),),
        n_samples=chance.choice([1, 2, 2, 3]),
        verifier=Verifier(name="taste"),
        terms=terms,
        manager_id=chance.choice(["north", "south"]),
        run_id=run,
        session_id=None if session is None else session_of(run, session),
        user_id=None if session is None else leaver_of(run),
    )
    yield 0.0, topics.TASKS, task
    # Some samples get no answer, as if their worker had died.
    answered_samples = [index for index in range(task.n_samples) if chance.random() >= 0.04]
    for index in answered_samples:
        late = chance.random() < 0.06
        answered = chance.uniform(DEADLINE_MS, DEADLINE_MS + 4000) / 1000 if late else chance.uniform(0.1, 3.0)
        results = [_result(chance, task, index, answer) for answer in range(1 + (chance.random() < 0.08))]
        for nth, result in enumerate(results):
            for event in _about(chance, family, result, answered + nth * chance.uniform(0.0, 2.0)):
                yield event
                if chance.random() < 0.04:
                    yield event[0] + chance.uniform(0.0, 5.0), *event[1:]
    # On a task without answers, feedback is rejected only when it is too old, which is later than most runs wait.
    if answered_samples and family != "plain" and chance.random() < 0.06:
        identity = f"{chance.getrandbits(64):x}"
        yield chance.uniform(0.1, 10.0), topics.FEEDBACK, _feedback(task, identity, score=1.0, **PRAISE)


def _about(chance: random.Random, family: str, result: Result, at: float) -> Iterator[Event]:
    yield at, topics.RESULTS, result
    said = max(0.05, at + chance.uniform(-1.0, 1.5 * WINDOW_MS / 1000))
    if chance.random() < 0.1:
        said = chance.uniform(0.05, 10.0)
    if family == "plain" or chance.random() < 0.06:
        return
    # Some feedback has no result: a form on a web page, for example, knows only the task and the sample.
    about = {"sample_index": result.sample_index, "result": None if chance.random() < 0.15 else result}
    if family == "graded":
        score = round(chance.random(), 3)
        yield said, topics.FEEDBACK, _feedback(result.task, f"{chance.getrandbits(64):x}", score=score, **about)
    elif result.status is Status.OK and chance.random() < 0.6:
        # The teacher needs a model, which is not tested here: the driver sends its half directly.
        yield said, topics.HALVES, _hint(chance, result)
    else:
        yield said, topics.FEEDBACK, _feedback(result.task, f"{chance.getrandbits(64):x}", **PRAISE, **about)


def _result(chance: random.Random, task: Task, index: int, answer: int) -> Result:
    failed = chance.random() < 0.03
    text = "" if failed else f"Cats purr when they are content, and to soothe themselves, time {answer}."
    tokens = b"" if failed else int32_bytes([chance.randrange(1000) for _ in range(TOKENS)])
    return Result(
        result_id=result_id(task.task_id, index, SPANS, tokens, text),
        event_time=now_ms(),
        opened_at=task.event_time,
        task=task,
        sample_index=index,
        worker_id=chance.choice(["early", "late"]),
        status=Status.FAILED if failed else Status.OK,
        error="it broke" if failed else None,
        text=text,
        prompt_token_ids=b"" if failed else int32_bytes([1, 2, 3]),
        response_token_ids=tokens,
        sampler_logprobs=b"" if failed else float32_bytes([-chance.random() for _ in range(TOKENS)]),
        logprobs_mode=LogprobsMode.PROCESSED,
        sampling=Sampling(temperature=0.7),
        policy_spans=SPANS,
        finish_reason="" if failed else "stop",
    )


def _feedback(task: Task, identity: str, **fields: Any) -> Feedback:
    """User feedback, on the whole task unless the fields name a sample."""
    return Feedback(
        feedback_id=identity, event_time=task.event_time, task_id=task.task_id, source=Source.USER, **fields
    )


def _hint(chance: random.Random, result: Result) -> Hint:
    sample = sample_of(result)
    accepted = chance.random() < 0.7
    return Hint(
        hint_id=derived_id("hint", result.result_id, "driver"),
        event_time=result.event_time,
        opened_at=result.opened_at,
        sample=sample if accepted else sample.without_tokens(),
        source=Source.USER,
        kind=HintKind.ACCEPTED if accepted else HintKind.REJECTED,
        hints=("Be brief.",),
        teacher_policy="base" if accepted else None,
        teacher_logprobs=float32_bytes([-0.25] * (len(sample.token_ids) // 4)) if accepted else None,
        hinter="driver",
        task_at=result.opened_at,
    )


def _request(run: str, number: int) -> Forget:
    """A request to forget a session: every other one limited to earlier records, some to one policy."""
    now = now_ms()
    return Forget(
        forget_id=derived_id("forget", run, str(number)),
        event_time=now,
        session_id=session_of(run, number),
        before=now if number % 2 else None,
        policy=(None, None, "assistant", "another")[number % 4],
    )


@dataclass
class Driver:
    """Sends `tasks` tasks evenly over `seconds` seconds, in a separate thread; a broker failure only delays it.

    Every `garbage`-th record on the halves topic is followed by an invalid one, with its value in `bad`; all other
    records are valid. Each of `sessions` sessions is forgotten while it continues, with the records that `tentalis
    forget` sends. `events` yields the records for a task number. `again`: all records are kept, and sent once more if
    not all of them are confirmed.
    """

    settings: Settings
    run: str
    tasks: int
    seconds: float
    seed: int
    garbage: int = 500
    events: Callable[[random.Random, str, int], Iterator[Event]] = events_of
    again: bool = True
    sessions: int = 0
    sent: int = 0
    bad: set[bytes] = field(default_factory=set)
    _driving: "Future[None]" = field(init=False)

    def start(self) -> None:
        pool = ThreadPoolExecutor(1)
        self._driving = pool.submit(self._drive)
        pool.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """True if all records are on the log. Raises the driver's error if it failed."""
        if self._driving.done():
            self._driving.result()
        return self._driving.done()

    def _drive(self) -> None:
        chance = random.Random(self.seed)
        publisher = Publisher(self.settings, "driver", make_codec(self.settings))
        waiting: list[tuple[float, int, str, Record]] = []
        serial = itertools.count()
        began, made, halves, asked = time.monotonic(), 0, 0, 0
        sent: list[tuple[str, Record, int | None]] = []

        def send(topic: str, record: Record, partition: int | None = None) -> None:
            publisher.send(topic, record, partition=partition)
            if self.again:
                sent.append((topic, record, partition))

        while made < self.tasks or waiting:
            now = time.monotonic() - began
            while made < self.tasks and made * self.seconds / self.tasks <= now:
                for after, topic, record in self.events(chance, self.run, made):
                    heapq.heappush(waiting, (now + after, next(serial), topic, record))
                made += 1
            if asked < self.sessions and (asked + 1) * self.seconds / (self.sessions + 1) <= now:
                request = _request(self.run, asked)
                for partition in range(topics.table().keyed_partitions):
                    send(topics.HALVES, request, partition)
                asked += 1
            while waiting and waiting[0][0] <= now:
                _, _, topic, record = heapq.heappop(waiting)
                send(topic, record)
                self.sent += 1
                halves += topic == topics.HALVES
                if topic == topics.HALVES and halves % self.garbage == 0:
                    value = chance.randbytes(40)
                    self.bad.add(value)
                    publisher.send_bytes(topic, record.key.encode(), value, [])
            time.sleep(0.02)
        try:
            publisher.flush(150)
        except DeliveryFailed:
            if not self.again:
                raise
            # librdkafka sometimes sends nothing to a restarted broker until its records time out. A client then sends
            # them again; the applications must tolerate these duplicates too.
            again = Publisher(self.settings, "driver", make_codec(self.settings))
            for topic, record, place in sent:
                again.send(topic, record, partition=place)
            again.flush(150)
