"""An agent of openai-agents, which asks for responses."""

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "rain"


agent = Agent(name="Weather", instructions="Be brief.", tools=[weather])
print(Runner.run_sync(agent, "How is the weather in Oslo?").final_output)
