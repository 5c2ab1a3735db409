"""Calls that agents and chat front ends make beside the conversation, in their words, and the requests of people.

`PEOPLE` is what the patterns must leave alone: main turns that speak of titles, summaries, memories, tags and clocks.
"""

import json

import pytest

from schemas.records import Message
from tentalis.gateway.calls.housekeeping import side_sign
from tests.support import ROOT

Call = tuple[str, str]
"""The system message and the last message of the user."""
KNOWN: list[Call] = [
    (call["system"], call["user"])
    for call in json.loads((ROOT / "tests" / "golden" / "housekeeping.json").read_text(encoding="utf-8"))
]
PEOPLE = [
    "Write a title for my blog post about cats",
    "Suggest a good title for a talk",
    "I need a title for a session at the conference about Kafka. Ideas?",
    "Give me three title ideas for this message to my customers: We are closed on Sunday.",
    "What would be a catchy name for our weekly team meeting?",
    "Can you give me a summary of our conversation so far?",
    "Please write a summary of this conversation that I can send to my boss.",
    "Provide a summary of the session we had with the customer: they want a refund, and we offered half.",
    "Summarize the discussion below in 200 words: Ann says A, Bob says B.",
    "Summarize this article about memory",
    "Summarise the following email thread for me: Hi Ann, ...",
    "Create a detailed summary of the book Dune.",
    "Generate some tags for my photo of Paris",
    "Which follow-up questions should I ask the candidate?",
    "What is a heartbeat?",
    "Is a resting heartbeat of 48 normal?",
    "How do I flush the DNS cache, and what is memory pressure?",
    "Write a crontab line that checks my mail every five minutes",
    "[cron] does not start on my server, why?",
    "My cron job prints nothing. What should it reply?",
    "OK",
    "ok, thanks",
    "Reply to this mail with a polite no: Would you come on Friday?",
    "Just say yes or no: is 91 a prime number?",
    "Answer with one word only: what is the capital of France?",
    "Extract the facts about the user from this interview: I am Ann, I like tea.",
    "Extract any file paths from this log: /var/log/a.txt opened",
    "You are a personal trainer. Plan my week.",
    "Act as a title company clerk: which documents do I need to sell a house?",
    "给我的文章起一个标题",
    "请总结一下这篇文章的主要内容",
    "这段对话是什么意思？",
    "Wie lautet der Titel des neuen Romans von Juli Zeh?",
    "Fasse unser Gespräch bitte zusammen, ich muss es meiner Chefin erklären.",
    "Résume notre conversation en trois points pour mon collègue.",
    "What did we talk about in our last conversation?",
    "Continue the conversation between Romeo and Juliet.",
    "Write a Python function that generates a title from a list of messages.",
    'Compact this JSON for me: {"a": 1}',
    "Write unit tests for the class ConversationTitleGenerator.",
]


def signed(system: str, user: str) -> str | None:
    before = [Message(role="system", content=system)] if system else []
    return side_sign([*before, Message(role="user", content=user)], {})


def missed(calls: list[Call]) -> list[str]:
    return [(system or user)[:60] for system, user in calls if signed(system, user) is None]


def test_the_housekeeping_that_is_known_is_told() -> None:
    assert missed(KNOWN) == []


@pytest.mark.parametrize("text", PEOPLE)
def test_what_people_ask_is_a_main_turn(text: str) -> None:
    assert signed("", text) is None
    assert signed("You are a helpful assistant. Suggest a title for the chat if the user asks for one.", text) is None
    spoken = [Message(role="user", content="hi"), Message(role="assistant", content="hello")]
    assert side_sign([*spoken, Message(role="user", content=text)], {}) is None


@pytest.mark.parametrize(
    "system",
    [
        "You are Claude Code, Anthropic's official CLI for Claude.",
        "You are BookBot. Answer each query with the title and the author of a book.",
        "You are a librarian: give the title of a book for each question.",
        "You are a support agent that summarizes the conversation at its end and gives it a label.",
        "Please write like a journalist: a title first, then the answer to the question.",
        "You are an assistant with a memory. Use the memories below.",
        "Summarize whatever the user sends in three sentences.",
        "You label each message of the user as spam or not.",
    ],
)
def test_an_assistant_with_a_task_of_its_own_has_main_turns(system: str) -> None:
    assert signed(system, "Something about cats") is None


def test_a_conversation_about_housekeeping_goes_on_as_main() -> None:
    """The prompt of a title generator in the middle of a conversation was pasted by a person."""
    pasted = Message(role="user", content=f"Why does this prompt give long titles? {KNOWN[0][1]}")
    assert (
        side_sign([pasted, Message(role="assistant", content="Because."), Message(role="user", content="And?")], {})
        is None
    )
