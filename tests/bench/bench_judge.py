"""A bundled model as the judge of the next messages on which the rules are silent, measured on the labelled messages.

The model judges with the product's prompt (`next_state`), one vote at temperature 0. Each verdict is written to
docs/results/judge/<model>.jsonl when it arrives: a run that was interrupted continues there. The page
docs/results/judge/README.md is drawn from these files.

BENCH_MODEL (qwen2.5-coder-0.5b): the model, which `tentalis serve model` serves for the run.
BENCH_JUDGE=URL: a chat endpoint in its place, which serves BENCH_MODEL.
BENCH_JUDGE_N: the number of messages to judge now, in an order by a hash. Default: all; 0 only draws the page.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.records import Feedback, Message, Opens, Source, Terms
from tentalis.local.ports import free_port
from tentalis.rewards.chat import ChatClient, ChatEndpoint
from tentalis.rewards.next_state import NextStateJudge, NextStateSettings
from tentalis.rewards.votes import NoVote
from tentalis.service.settings import Settings
from tests.bench import judge_page
from tests.bench.judge_page import FOLDER, Verdict
from tests.bench.lab import log, process, report, wait_until_ready
from tests.bench.signals_set import Case, cases, predicted
from tests.support.loop_records import result, task

TERMS = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)
SETTINGS = NextStateSettings(kind="next_state", judge="bench", votes=1, temperature=0.0, max_tokens=100, max_chars=1000)
TIME_LIMIT_S = 100.0
TOGETHER = 4
KEPT_CHARS = 160
READY_S = 300.0


def silent_cases() -> list[Case]:
    """The next messages of the held half on which the rules are silent, in an order by a hash."""
    found = [case for case in cases() if case.kind == "next" and not case.seen and predicted(case) == 0]
    return sorted(found, key=lambda case: hashlib.sha256(case.id.encode()).hexdigest())


class HeardChat(ChatClient):
    """A client that keeps the answers to its last question."""

    heard: list[str | None]

    async def ask(self, *given: Any, **named: Any) -> list[str | None]:
        self.heard = await super().ask(*given, **named)
        return self.heard


async def verdict(chat: HeardChat, case: Case) -> Verdict:
    """The judge's verdict of a case."""
    judge = NextStateJudge(chat, SETTINGS)
    turn = task("t", n=1, terms=TERMS).model_copy(
        update={"messages": (Message(role="user", content=case.row["question"]),)}
    )
    answer = result(turn).model_copy(update={"text": case.row["answer"]})
    feedback = Feedback(
        feedback_id=case.id,
        event_time=0,
        task_id="t",
        source=Source.NEXT_STATE,
        author=case.row["role"],
        text=case.row["next"],
        result=answer,
    )
    began = time.monotonic()
    try:
        found = await judge.judge_feedback(turn, answer, feedback)
    except NoVote:
        return Verdict(case.id, None, None, round(time.monotonic() - began, 1))
    text = (chat.heard[0] or "")[-KEPT_CHARS:]
    readable = found.reward is not None and not found.components["votes_unparsable"]
    said = int(found.reward or 0) if readable else None
    return Verdict(case.id, said, text, round(time.monotonic() - began, 1))


async def judged(of: Sequence[Case], url: str, model: str, path: Path) -> None:
    """Judges the cases, TOGETHER at a time, and appends each verdict to the file."""
    queue = list(reversed(of))
    with path.open("a", encoding="utf-8") as sink:

        async def worker() -> None:
            async with HeardChat(ChatEndpoint(url=url, model=model, time_limit_s=TIME_LIMIT_S)) as chat:
                while queue:
                    case = queue.pop()
                    found = await verdict(chat, case)
                    sink.write(found.line + "\n")
                    sink.flush()
                    log(f"{case.id}: labelled {case.label}, judged {found.said} ({found.text!r}), {found.seconds} s")

        await asyncio.gather(*(worker() for _ in range(TOGETHER)))


@contextmanager
def server(model: str) -> Iterator[str]:
    """Serves a model until the block ends."""
    port = free_port()
    # The model server has no use for a broker; the settings of a command name one.
    settings = Settings.from_env().model_copy(update={"bootstrap": "127.0.0.1:1"})
    command = ["serve", "model", "--policy-model", model, "--served-name", model, "--port", str(port)]
    with process(settings, *command) as child:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{url}/health", READY_S, child)
        yield url


def main() -> None:
    model = os.environ.get("BENCH_MODEL", "qwen2.5-coder-0.5b")
    path = FOLDER / f"{model}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {each.id for each in judge_page.read(path)}
    left = [case for case in silent_cases() if case.id not in done]
    left = left[: int(os.environ.get("BENCH_JUDGE_N", len(left)))]
    if left:
        if url := os.environ.get("BENCH_JUDGE"):
            asyncio.run(judged(left, url, model, path))
        else:
            with server(model) as url:
                asyncio.run(judged(left, url, model, path))
    judge_page.write(SETTINGS.max_tokens, SETTINGS.max_chars)
    report(**judge_page.figures(path))


if __name__ == "__main__":
    main()
