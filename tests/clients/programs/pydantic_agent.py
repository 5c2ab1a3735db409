"""An agent of pydantic-ai."""

from pydantic_ai import Agent

agent = Agent("openai:gpt-4o-mini", instructions="Be brief.")


@agent.tool_plain
def weather(city: str) -> str:
    """The weather of a city."""
    return "rain"


print(agent.run_sync("How is the weather in Oslo?").output)
