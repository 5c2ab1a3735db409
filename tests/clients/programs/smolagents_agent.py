"""A tool-calling agent of smolagents."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city.
    """
    return "rain"


model = OpenAIServerModel("gpt-4o-mini", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[weather], model=model, verbosity_level=0).run("How is the weather in Oslo?"))
