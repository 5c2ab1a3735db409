"""Asks the base model and the newest adapter the same questions, with greedy decoding, for comparison."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tentalis.agents.scenarios import Scenario
from tentalis.demo.summary import AnswerPair
from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import RequestRefused

CHECK_S = 0.2

T = TypeVar("T")


def compare_answers(server: str, newest: str, scenario: Scenario, check: Callable[[], None]) -> tuple[AnswerPair, ...]:
    """Returns the answers of the server at this URL to the scenario's showcase questions.

    An answer that the server refuses is replaced by the error message. Calls `check` every CHECK_S seconds while it
    waits. Raises ServerUnavailable, and any exception of `check`.
    """

    return checked(_compare(server, newest, scenario), check)


def checked(work: Coroutine[Any, Any, T], check: Callable[[], None]) -> T:
    """Runs `work` to its end; calls `check` every CHECK_S seconds meanwhile. Raises any exception of both."""

    async def watched() -> T:
        working = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({working}, timeout=CHECK_S))[0]:
                check()
            return working.result()
        finally:
            working.cancel()

    return asyncio.run(watched())


async def _compare(server: str, newest: str, scenario: Scenario) -> tuple[AnswerPair, ...]:
    async with OpenAIClient(server, timeout=120.0) as client:
        base = next(str(card["id"]) for card in await client.models() if not card.get("parent"))

        async def answer(model: str, prompt: list[dict[str, str]]) -> str:
            try:
                generation = await client.generate(
                    model, prompt, temperature=0.0, max_tokens=scenario.sampling.max_tokens, seed=0
                )
            except RequestRefused as error:
                return f"(no answer: {error.message})"
            return generation.completions[0].text.strip()

        prompts = [[{"role": m.role, "content": m.content} for m in messages] for messages in scenario.showcase]
        said = await asyncio.gather(*(answer(model, prompt) for prompt in prompts for model in (base, newest)))
    return tuple(AnswerPair(prompt[-1]["content"], said[2 * i], said[2 * i + 1]) for i, prompt in enumerate(prompts))
