"""A graph of langgraph that drafts an answer and revises it until it is short. It knows nothing of Tentalis."""

import json
import pathlib
import sys
from typing import Annotated, TypedDict

from langchain_core.messages import AnyMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages


class State(TypedDict):
    """The conversation."""

    messages: Annotated[list[AnyMessage], add_messages]


model = ChatOpenAI(model="gpt-4o-mini", temperature=0)


def write(state: State) -> State:
    """Asks the model."""
    return {"messages": [model.invoke(state["messages"])]}


def shorten(state: State) -> State:
    """Asks for a shorter answer."""
    return {"messages": [("user", "Shorter, please.")]}


def next_node(state: State) -> str:
    """Ends with a short answer."""
    return "shorten" if len(state["messages"][-1].content) > 5 else END


graph = StateGraph(State)
graph.add_node("write", write)
graph.add_node("shorten", shorten)
graph.add_edge(START, "write")
graph.add_conditional_edges("write", next_node, ["shorten", END])
graph.add_edge("shorten", "write")
asked = json.load(sys.stdin)["prompt"]
answer = graph.compile().invoke({"messages": [("user", asked)]})["messages"][-1].content
pathlib.Path("answer.txt").write_text(answer)
