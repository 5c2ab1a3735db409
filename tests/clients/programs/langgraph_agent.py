"""The prebuilt agent of langgraph."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "rain"


agent = create_agent(ChatOpenAI(model="gpt-4o-mini"), [weather])
print(agent.invoke({"messages": [("user", "How is the weather in Oslo?")]})["messages"][-1].text)
