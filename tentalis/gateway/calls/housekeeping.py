"""Recognises the calls that agents and chat front ends make beside the conversation, by their words. Pure.

A system message that begins with such a task is one. So is a message of the user that gives the task as programs do:
with the form of the answer, the use of it, or the conversation in it. People also ask for titles and summaries.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.records import Message
from tentalis.inference.chat_messages import texts

# Characters searched for a sign: it is at the start of such a call. A person's long message may quote one further on.
SEARCHED_CHARS = 1500


def _pattern(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(alternatives), re.IGNORECASE | re.DOTALL)


_TALK = (
    "(chat|conversation|thread|session|message|dialogue|discussion|exchange|query|request|question|interaction"
    "|history)s?"
)
_VERB = r"(generate|create|write|provide|give|suggest|produce|(come|coming) up with|summari[sz]e|name|propose|return)"
_TITLE = r"(title|chat name|label|topic name|short name)s?"
_ROLE = r"\W{0,10}(you are|you're|act as|your (task|job|role|goal) is( to)?)\b"
_KNOWLEDGE = r"[^.\n]{0,30}\b(information|facts|memories|preferences|details|what)"
_SPOKEN = r"(conversation|chat|dialogue|messages|turn)"
_THREAD = "(chat|conversation|thread|session|dialogue|discussion)s?"
_DOES = rf"({_ROLE}|\W{{0,10}}(you|please|{_VERB})\b)"
# The beginnings of a system message that gives a model no other task.
_SYSTEM_ROLES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "title",
        _pattern(
            rf"{_DOES}[^.\n]{{0,80}}\b({_TITLE}|titling) (generator|writer|maker|assistant)\b",
            rf"{_DOES}[^.\n]{{0,60}}\b{_THREAD} {_TITLE}\b",
            rf"{_DOES}[^.\n]{{0,80}}\b{_TITLE}\b( \([^)\n]{{0,40}}\))?,? (for|of|based on|from|summari[sz]\w{{1,4}}) "
            rf"[^.\n]{{0,60}}\b{_THREAD}\b",
            rf"\W{{0,10}}summari[sz]e (this|the)( \w{{1,20}})? {_TALK} in (under|at most|no more than|\d)",
            r".{0,60}(会话|对话|聊天).{0,60}(标题|主题|名称)",
        ),
    ),
    ("commit", _pattern(rf"{_ROLE}[^.\n]{{0,80}}\b(generat|writ|creat)\w{{1,4}} [^.\n]{{0,60}}\bcommit messages?\b")),
    ("tags", _pattern(r"\W{0,10}extract any file paths that this command\b", rf"{_ROLE} process bash commands\b")),
)
# Signs in the last message of the user, or at the beginning of a system message.
_TASKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "heartbeat",
        _pattern(
            r"\bHEARTBEAT_OK\b",
            r"\bread HEARTBEAT\.md\b",
            r"^\s*\[?(system )?heartbeat( poll| check)?\]?\W*$",
            r"^\s*\[cron:",
        ),
    ),
    (
        "memory",
        _pattern(
            r"\bmemory flush\b",
            r"\bstore durable memories\b",
            r"\bsession (is )?near(ing)? (auto-)?compaction\b",
            r"\bcontext checkpoint compaction\b",
            r"\bhandoff summary\b",
            r"^\W{0,10}(briefly\W{1,3})?summari[sz]e this partial conversation\b",
            rf"^{_ROLE} summari[sz]ing (a|the|this) {_SPOKEN}\b",
            rf"\bcompaction summary of the {_SPOKEN}\b",
            rf"\bextract (key|new|durable) (facts|memories) from the {_SPOKEN}\b",
            rf"^{_ROLE}[^.\n]{{0,60}}\b(personal information organizer|memory (manager|extractor|extraction"
            r"|organizer)|context-aware state summary|context summarizer|fact extraction|(tasked with|for"
            r"|speciali[sz]ed in|responsible for) [^.\n]{0,20}summari[sz]ing [^.\n]{0,40}\b(conversation|chat|dialogue"
            r"|session|history)|that summari[sz]es [^.\n]{0,30}\bhistory)",
            r"\b(summari[sz]e|compress|compact|condense) (the|this|our) (\w{1,20} )?"
            r"(conversation|chat|dialogue) history\b",
            rf"\bextract {_KNOWLEDGE}\b[^.\n]{{0,40}}\b(about|of) the user [^.\n]{{0,20}}\b{_SPOKEN}\b",
            rf"\b{_SPOKEN}\b[^\n]{{0,60}}\bextract {_KNOWLEDGE}\b[^.\n]{{0,40}}\b(the user|remember(ed)?)\b",
            rf"\bextract {_KNOWLEDGE} from (the|this) {_SPOKEN}\b[^\n]{{0,120}}\bjson\b",
            r"\byour task is to (create|write|provide|produce) an? (\w{1,20} ){0,5}summary of (the|our|this) "
            r"(conversation|session|chat)\b",
            r"\bsummar(y|i[sz]e)\b[^\n]{0,160}\b(future context|context window|concise context"
            r"|will (continue|resume|replace|receive)|unresolved (tasks|problems|questions)|summary text"
            r"|prompt instructions|another (llm|language model|model|agent|assistant))\b",
            r"总结.{0,20}(对话|会话|聊天).{0,20}(上下文|后续)",
            r"\bprogressively summari[sz]e the (conversation|lines of conversation)\b",
            r"^\W{0,10}summari[sz]e the following tool output\b",
            r"\bsummary of (our|the|this) (conversation|chat|session) so far\b[^\n]{0,400}"
            r"\bcontinue (our|the|your) work\b",
            r"\b(fass\w*|zusammen\w*|résum\w+|resum\w+)\b[^\n]{0,160}\b(kontext\w*|contexte|contexto)\b",
            r"\bsummari[sz]e the user's [^.\n]{0,40}\bin (this|the) (conversation|chat|session)\b",
        ),
    ),
    (
        "heartbeat",
        re.compile(  # a word such as NO_REPLY, in capitals
            r"\b(?i:if\b[^\n]{0,100}\b(nothing|no (new|changes?|updates?))\b[^\n]{0,100}\b(reply|respond|answer|output"
            r"|return|say)\b)[^\n]{0,40}\b[A-Z]{2,20}(_[A-Z]{2,20})+\b"
        ),
    ),
    (
        "tags",
        _pattern(
            r"^\s*#{1,4} task:\s*(generate|suggest|analy[sz]e|create)\b.{0,120}\b(tags?|follow-up|search quer|queries"
            r"|autocomplet)",
            r"\banaly[sz]e if this message indicates a new (conversation )?topic\b",
            r"^\s*\[suggestion mode\b",
            r"\b(generate|suggest|propose) [^.\n]{0,60}\b(follow-?up|related) questions\b[^.\n]{0,40}\bthe user\b",
            r"\brephrase the follow[ -]?up( question| input)?\b.{0,40}\bstandalone (question|query)\b",
            r"\bdetermine who should (logically )?speak next\b",
        ),
    ),
)
_ASKS_FOR_TITLE = _pattern(
    rf"\b{_VERB}\b[^.\n]{{0,80}}\b{_TITLE}\b[^.\n]{{0,80}}\b{_TALK}\b",
    rf"\b(give|name) (this|the|our) {_TALK} an? (\w{{1,20}} ){{0,2}}(name|title)\b",
    rf"\b(this|the|that|our|following)( \w{{1,20}})? {_TALK}\b[^\n]{{0,80}}\b{_TITLE}\b",
    rf"\bsummari[sz]e (this|the|our) {_TALK}( topic)? in (under |at most )?(\d|1\d|20) words\b",
    r"\b(thema|titel|sujet|titre|tema|título)\b.{0,160}\b(ohne satzzeichen|sans ponctuation|sin puntuación"
    r"|sem [^.\n]{0,60}\bpontuação)",
    r"(标题|简要主题).{0,60}(会话|对话|聊天|这句话)",
    r"(会话|对话|聊天|这句话).{0,60}(标题|简要主题)",
)
_LENGTH = r"(words?|char(acter)?s?)\b"
# The form of an answer as programs ask for it, or the conversation itself.
_FORM = _pattern(
    rf"\b\d{{1,3}}\s?(-|to|–|—)\s?\d{{1,3}}[ -]?{_LENGTH}",
    rf"\b(two|three|four|five|six)( to |-)?\w{{0,6}} {_LENGTH}",
    rf"\b\d{{1,3}}[ -]{_LENGTH}[ -](or[ -](less|fewer)|max)",
    rf"\b(max(imum)?|limited to|up to|in|under|at most|than)( of)? \d{{1,3}} {_LENGTH}",
    r"\bword-or-less\b|\ba few words\b",
    r"\b(only|just|return) the (title|name)\b",
    r"\btitle (and nothing else|itself|only|case|text)\b",
    r"\b(no|without)( any)? (quotes|quotation|punctuation|lead-in|explanation|preamble)\b",
    r"#{1,4} task:",
    r"<(chat_history|conversation|messages?|user|content|transcript)>",
    r"\b(chat history|conversation|transcript|messages?):\s",
    rf"\b({_TALK}|prompt)( message)?: \"",
    r"\b(chat|conversation|session|thread)[.:]\s{0,8}\n\s{0,8}\n",
    r"^\s*(user|human): .{0,800}\n\s*(assistant|ai): ",
    r"\b(ohne satzzeichen|sans ponctuation|sin puntuación|pontuação)\b",
    r"个字|字以内|不(要|需要).{0,10}标点|直接(返回|回复)",
)
_OK = (
    r"(please )?(reply|respond|answer|say)( with)?( just| only| exactly)*( the( single)? word)?[: ]+[\"'`]?"
    r"(ok|okay|pong|ack|ready|alive)[\"'`]?[.!]?( (and )?nothing else[.!]?)?\s*"
)
_PROBE = _pattern(rf"\s*{_OK}")
_PROBE_OF_SYSTEM = _pattern(rf"([^.\n]{{0,80}}\. ){_OK}")


def side_sign(messages: Sequence[Message], body: Mapping[str, Any]) -> str | None:
    """The name of the sign that marks a call as an agent's housekeeping, None if it has no sign.

    Example: a last user message "Read HEARTBEAT.md ... reply HEARTBEAT_OK." -> "heartbeat"
    """
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if isinstance(limit, int) and limit <= 1:
        return "probe"
    system = next(texts(messages, "system"), "")[:SEARCHED_CHARS]
    for name, pattern in _SYSTEM_ROLES:
        if pattern.match(system):
            return name
    # A system message after the conversation is its task, as some front ends send it.
    user = messages[-1].content[:SEARCHED_CHARS] if messages and messages[-1].role in ("user", "system") else ""
    for name, pattern in _TASKS:
        if pattern.search(user) or pattern.match(system):
            return name
    if _ASKS_FOR_TITLE.search(user) and _FORM.search(user):
        return "title"
    probes = _PROBE.fullmatch(user) or _PROBE.fullmatch(system) or _PROBE_OF_SYSTEM.fullmatch(system)
    return "probe" if probes and _is_first(messages) else None


def _is_first(messages: Sequence[Message]) -> bool:
    """True for a call without an earlier turn."""
    return sum(message.role != "system" for message in messages) == 1
