"""Runs every function that reads text from outside over texts that make careless patterns slow.

Run as a program: prints the name of each scanner that used more than SCANNER_S seconds of CPU time for one text, or
that raised; for the patterns of a module the limit is PATTERNS_S. It is CPU time of a child process, so a busy machine
does not change the answer. A linear scanner needs a fifth of it at most; a quadratic one needs several times as much.
"""

import importlib
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path

from schemas.records import Message
from tentalis.agents.environments import agent_repositories, dockerfile, step_tags, swe_turns, terminal_turns
from tentalis.agents.environments.shown_paths import ShownPaths
from tentalis.gateway.calls import housekeeping, session_id
from tentalis.inference import response_format
from tentalis.inference import tool_calls as server_calls
from tentalis.opd.hints import rule_hint
from tentalis.opd.verdict import vote_of
from tentalis.rewards import answers, steps, style_scorer
from tentalis.signals import AnsweredTurn, ToolOutput, UserMessage, detect, edits, phrases, questions, spoken, tools
from tentalis.text import tool_calls, tool_output, words

judge_module = importlib.import_module("tentalis.traces.judge")
FOLDERS = ShownPaths({"/app": Path("/a/app"), "/tmp": Path("/a/tmp")})
CHARS = 20_000
SCANNER_S, PATTERNS_S = 0.8, 4.0

_UNITS = (
    *(
        "1 errors ",
        "1 tests failed ",
        "1 passed ",
        "exit code ",
        "a: ",
        "a/",
        "x:1:",
        "failed to a",
        "error[",
        "=",
        "<",
    ),
    *(
        "\n",
        " ",
        "\t",
        "\r\n",
        "\n\n ",
        "\u2028",
        "a",
        "a ",
        "ab ",
        "A",
        "_",
        "1",
        "1 ",
        "1,",
        "1,111",
        "1/",
        "1-",
        ".",
        ". ",
    ),
    *("<answer>", "<answer>\n", "</answer>", "answer is ", "final ", "answer ", "answer to ", "#### ", "#"),
    *(
        "\\boxed{",
        "\\boxed ",
        "\\boxed",
        "\\frac{",
        "\\frac{1}{",
        "\\text{ ",
        "\\sqrt",
        "1\\text{ ",
        "{",
        "}",
        "(1,",
        "[",
        "\\",
        '\\"',
    ),
    *("no, ", "not ", "not a, ", "i said ", "i mean, ", ", i mean", "thanks ", "ok ", "please ", "again ", "you got "),
    *("- ", "* ", "1. ", "| ", "**", "```", "> ", "!", "?", "'", '"', "’", "!'", ",", ";", "😀", "e\u0301", "é"),
    *("\x1b[", "\x1b[0", "\x1b]", "\x1b", "<|"),
    *("<plan>", '<edit path="a">\n', "</edit>\n", "<<<<<<< SEARCH\n", "<<<<<<< SEARCH\n=======\n"),
    *("generate a title ", "heartbeat ", "### task: ", "which ", "could not ", "tool ", "java.", "a.b"),
    *("<step>", "<tool_call>", "<tool_call>{", "[a]"),
    *("apt ", "pip ", "curl ", "git ", "apt -y ", "ENV A=$A$A\n", "\\ ", "$A"),
)
_HEADS = (
    "<answer>",
    "\\boxed",
    "1\\text{",
    "answer is",
    "final",
    "please",
    "exit code",
    "-",
    "1",
    "no",
    "i'm sorry",
    "a",
    "#",
)
_BLANKS = ("\n", " ", "\t ", "a", ".", "1", "\n\n")


def hostile_texts(length: int = CHARS) -> Iterator[str]:
    """Yields texts of about `length` characters: a unit repeated, with an end that cannot match."""
    for unit in _UNITS:
        yield unit * (length // len(unit)) + "\x00"
    for head in _HEADS:
        for blank in _BLANKS:
            yield head + blank * (length // len(blank)) + "\x00"


def _side(text: str) -> object:
    return housekeeping.side_sign([Message(role="system", content=text), Message(role="user", content=text)], {})


def _edit(text: str) -> object:
    tokens = text.split() or list(text)
    cut = " ".join(tokens[: edits.MAX_TOKENS]) if len(tokens) > 1 else " ".join(text[: edits.MAX_TOKENS])
    broken = " ".join(word if at % 7 else "other" for at, word in enumerate(cut.split()))
    return edits.find_edit(cut, text), edits.find_edit(cut, broken), edits.find_edit(broken, cut + " " + cut)


def _turn(text: str) -> object:
    turn = AnsweredTurn(text, text)
    return detect(turn, UserMessage(text)), detect(turn, ToolOutput(text))


def _streamed_calls(text: str) -> object:
    stream = server_calls.ToolCallStream({"x"})
    return [stream.push(text[at : at + 5]) for at in range(0, len(text), 5)], stream.finish()


def _tool_name(text: str) -> object:
    with suppress(response_format.InvalidFormat):
        return response_format.answer_grammar(None, [{"function": {"name": text}}], "required")
    return None


def _git_settings(text: str) -> object:
    lines = (f"[user] name = {text};", f'[user] name = "{text}', f"[user]{text}", text)
    return [list(agent_repositories._kept_lines(line)) for line in lines]


def _dockerfile(text: str) -> object:
    found, end = [], text[-CHARS // 4 :]  # `shlex` reads character by character
    for line in ("", "RUN ", "RUN apt install ", "COPY [", "ENV A=b\nENV A="):
        try:
            found.append(dockerfile.parsed_dockerfile(line + end, "/"))
        except ValueError:  # a task with this Dockerfile is refused
            continue
    return found


SCANNERS: dict[str, Callable[[str], object]] = {
    "signals.detect": _turn,
    "signals.find_failure": tools.find_failure,
    "signals.find_success": tools.find_success,
    "signals.accepts": phrases.accepts,
    "signals.spoken": spoken.spoken,
    "signals.question_back": questions.question_back,
    "signals.find_edit": _edit,
    "hints.rule_hint": rule_hint,
    "verdict.vote_of": vote_of,
    "answers.stated_answer": answers.stated_answer,
    "answers.final_number": answers.final_number,
    "answers.latex_answer": answers.latex_answer,
    "answers.boxed": answers.boxed,
    "answers.same_latex": lambda text: answers.same_latex(text, text + "1"),
    "steps.paragraphs": lambda text: steps.step_starts(text, steps._PARAGRAPHS.split(text)[:64]),
    "style.check_style": lambda text: style_scorer.check_style(text, text, stopped=True),
    "traces.judge": lambda text: judge_module.judge(text, text),
    "terminal_turns.parsed_turn": terminal_turns.parsed_turn,
    "swe_turns.parsed_swe_turn": swe_turns.parsed_swe_turn,
    "swe_turns.parsed_swe_turn of an edit": lambda text: swe_turns.parsed_swe_turn(f'<edit path="a">\n{text}'),
    "agent_repositories.disarm": _git_settings,
    "dockerfile.installation": dockerfile.installation,
    "dockerfile.parsed_dockerfile": _dockerfile,
    "step_tags.steps_or_whole": step_tags.steps_or_whole,
    "tool_calls.requested_calls": tool_calls.requested_calls,
    "inference.tool_calls": lambda text: server_calls.answer_parts(text, {"x"}),
    "inference.tool_calls of a stream": _streamed_calls,
    "inference.response_format": _tool_name,
    "shown_paths.real": FOLDERS.real,
    "shown_paths.shown": FOLDERS.shown,
    "tool_output.readable_text": lambda text: tool_output.readable_text(text.encode()),
    "words.sentences": words.sentences,
    "words.content_stems": words.content_stems,
    "housekeeping.side_sign": _side,
    "session_id.derived": lambda text: session_id.derived_session_id("", "", [Message(role="system", content=text)]),
}

BOUNDED: dict[str, int] = {
    "tentalis.signals.phrases": phrases.MAX_CHARS,
    "tentalis.signals.lexicon": phrases.MAX_CHARS,
    "tentalis.signals.languages": phrases.MAX_CHARS,
    "tentalis.signals.spoken": spoken.READ_CHARS,
    "tentalis.signals.questions": questions.MAX_CHARS,
    "tentalis.signals.tools": tools.LINE_CHARS,
    "tentalis.gateway.calls.housekeeping": housekeeping.SEARCHED_CHARS,
    "tentalis.gateway.calls.session_id": CHARS,
    "tentalis.opd.hints": CHARS,
    "tentalis.rewards.answer_judge": CHARS,
    "tentalis.rewards.answers": CHARS,
    "tentalis.rewards.functions.traceback_text": CHARS,
    "tentalis.rewards.steps": CHARS,
    "tentalis.rewards.style_scorer": CHARS,
    "tentalis.rewards.votes": CHARS,
    "tentalis.text.tool_calls": CHARS,
    "tentalis.text.tool_output": CHARS,
    "tentalis.text.words": CHARS,
    "tentalis.traces.judge": judge_module._BEGINNING,
    "tentalis.inference.chat_messages": CHARS,
    "tentalis.inference.chat_prompt": 0,
    "tentalis.inference.response_format": 0,
    "tentalis.agents.environments.agent_program": CHARS,
    "tentalis.agents.environments.agent_repositories": 0,
    "tentalis.agents.environments.dockerfile": 0,
    "tentalis.agents.environments.folders": 255,
    "tentalis.agents.environments.gui_task": 0,
    "tentalis.agents.environments.gui_tree": CHARS,
    "tentalis.agents.environments.shown_paths": 0,
    "tentalis.agents.environments.step_tags": CHARS,
    "tentalis.agents.environments.swe_instances": 0,
    "tentalis.agents.environments.swe_must_fail": CHARS,
    "tentalis.agents.environments.swe_turns": 0,
    "tentalis.agents.environments.terminal_task": 0,
    "tentalis.agents.environments.terminal_turns": CHARS,
    "tentalis.agents.sandbox.abandoned": 4096,
    "tentalis.agents.sandbox.attributes": 0,
    "tentalis.agents.sandbox.bubblewrap_init": 4096,
    "tentalis.text.timestamps": 0,
    "tentalis.traces.client": 0,
    "tentalis.inference.lora": 0,
}
"""Modules with patterns, and the number of characters of outside text that their patterns see. 0: they see none, see
what an operator chose, or are matched at one place of a text alone; then a scanner above tries them."""


def patterns_of(module: object) -> list[re.Pattern[str]]:
    """The compiled patterns among the globals of a module, also within tuples and records."""
    found: list[re.Pattern[str]] = []
    waiting = list(vars(module).values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, re.Pattern):
            found.append(value)
        elif isinstance(value, tuple):
            waiting += value
        elif is_dataclass(value) and not isinstance(value, type):
            waiting += [getattr(value, field.name) for field in fields(value)]
    return found


def _with_patterns(length: int, patterns: list[re.Pattern[str]]) -> Callable[[], None]:
    def run() -> None:
        for text in hostile_texts(length):
            _limit_cpu(PATTERNS_S)
            for pattern in patterns:
                for _ in pattern.finditer(text):
                    pass

    return run


def _over(scanner: Callable[[str], object]) -> Callable[[], None]:
    def run() -> None:
        for text in hostile_texts():
            _limit_cpu(SCANNER_S)
            scanner(text)

    return run


def jobs() -> dict[str, Callable[[], None]]:
    """The work of each child process, by name."""
    work = {name: _over(scanner) for name, scanner in SCANNERS.items()}
    for module, length in BOUNDED.items():
        if length:
            work[module] = _with_patterns(length, patterns_of(importlib.import_module(module)))
    return work


def _limit_cpu(seconds: float) -> None:
    """Lets the process use so much CPU time from now on."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process


def _status(run: Callable[[], None]) -> int:
    """Runs a job in a child with a limit of CPU time; returns its wait status."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def modules_with_patterns(root: Path) -> set[str]:
    """The modules under these packages that use `re`, or make patterns of a lexicon, by name."""
    packages = ("agents", "signals", "rewards", "opd", "text", "traces", "gateway", "inference")
    files = (file for package in packages for file in (root / "tentalis" / package).rglob("*.py"))
    return {
        ".".join(file.relative_to(root).with_suffix("").parts)
        for file in files
        if re.search(
            r"^(import re|from re import|from tentalis.signals.lexicon import .*patterns)\b", file.read_text(), re.M
        )
    }


def main() -> None:
    """Prints the names of the jobs that did not end in time, one a line."""
    wanted = sys.argv[1:]
    for name, run in jobs().items():
        if not wanted or name in wanted:
            began = os.times().children_user
            status = _status(run)
            print(f"{name} {os.times().children_user - began:.1f} {status}", file=sys.stderr, flush=True)
            if status:
                print(name, flush=True)


if __name__ == "__main__":
    main()
