"""A function agent of llama-index, which asks for streams."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """The weather of a city."""
    return "rain"


async def main() -> None:
    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    llm = OpenAILike(
        model="gpt-4o-mini", api_base=base, api_key=key, is_chat_model=True, is_function_calling_model=True
    )
    agent = FunctionAgent(tools=[weather], llm=llm, system_prompt="Be brief.")
    print(await agent.run("How is the weather in Oslo?"))


asyncio.run(main())
