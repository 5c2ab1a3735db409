"""Detects tool output that reports a failure."""

import json
import re
from typing import Any

_LINES = 40
"""Lines read from the beginning and from the end, where failures are reported."""

LINE_CHARS = 400
"""Characters read of each line: some patterns need time that grows with the square of this number."""
READ_CHARS = 100_000
"""Characters read of an output that is not JSON: half from the beginning, half from the end."""
JSON_CHARS = 1_000_000
"""A longer output is not parsed as JSON."""

_FAILURE_START = re.compile(
    r"""^\s*(?:
        traceback\ \(most\ recent\ call\ last\)
      | (?:fatal\ )?error(?:\[[^\]]*\]|\ from\ server)?\s*[:(]
      | fatal\s*: | panic\s*: | exception\s*: | conflict\ \(
      | npm\ err!
      | http(?:/[\d.]+)?\ (?:error\ )?[45]\d\d\b
      | <[a-z_]*error> | <error\b
      | (?:i\ )?(?:could\ not|couldn't|cannot|can't|unable\ to|failed\ to)\ \w+
      | (?:java|kotlin|scala|javax|org|com)(?:\.\w+)+(?:Exception|Error)\b
      | make(?:\[\d+\])?:\ \*\*\*
      | (?:[a-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Warning(?=:\ fatal))\b\s*[:(]
      | psycopg2\.errors\.\w+\s*:
      | (?:unauthorized|forbidden|permission\ denied|access\ denied|not\ found|bad\ request|internal\ server\ error)\b
      | (?:unknown|invalid|no\ such|missing|unsupported)\ (?:
            tool|function|argument|parameter|command|json|token|file|option|path|url)\b
      | (?:tool|command|request|call|execution|operation|connection|build|query|upload|download)\b[^.\n]{0,40}\b
            (?:failed|timed\ out|refused|denied|rejected|errored)\b
      | segmentation\ fault | killed\b | aborted\b | out\ of\ memory | timeout\b
      | (?:element|file|page|resource|user|item|key)\ not\ found\b
      | !\ \[rejected\]
      | (?:wrong|incorrect)(?:\ \w{1,20}){1,2}\s?[!.]?\s*$
      | your\ (?:proposed\ )?(?:edit|change|command|patch)\b[^.\n]{0,40}\b(?:error|failed|rejected|did\ not\ apply)
      | execution\ timed\ out\b
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_SHELL = re.compile(
    r"^\s*(?:[\w./-]+: ){1,3}(?:[^:\n]{0,120}: )?(?:no such file(?: or directory)?|permission denied|command not found"
    r"|not a directory|is a directory|cannot [^:\n]+|not found|operation not permitted|connection refused)\b"
    r"|^\s*[\w./-]+: command not found: \S+"
    r"|^\s*[\w./-]+: (?:unknown|unrecognized|invalid|illegal|bad) \w+",
    re.IGNORECASE,
)
_COMPILER = re.compile(r"^[\w./\\-]+:\d+:\d+: (?:fatal )?error\b", re.IGNORECASE)
# Words that somebody else wrote stand in a tool's output. So these patterns take a line only as a whole.
_EXIT = re.compile(
    r"""^\s*(?:observation(?:\ \d{1,4})?:\ )?[\[(]?(?:
        (?:(?:the\ |your\ )?(?:command|process|program|script)\ (?:completed|finished|failed|ended|returned)\ with\ )?
            exit\ (?:code|status)
      | (?:the\ |your\ )?(?:[\w.-]{1,80}\ )?exited(?:\ with)?(?:\ exit)?\ (?:code|status)
    )\s?[:=]?\s?(-?\d{1,10})\.?[\])]?\.?\s*$""",
    re.IGNORECASE | re.VERBOSE,
)
_RETURN_CODE = re.compile(r"^\s*<(?:returncode|exit_?code)>\s?(-?\d{1,10})\s?</\w{1,20}>\s*(?:<|$)", re.IGNORECASE)
_COUNT = (
    r"\d{1,9}\ (?:tests?\ |subtests\ )?(?:passed|failed|failures?|errors?|skipped|xfailed|xpassed|deselected|warnings?"
    r"|total|ignored|measured|filtered\ out|todo|flaky|rerun)"
)
_SUMMARY = re.compile(
    rf"""^\W*
    (?P<title>test\ result:\ \w{{1,20}}\.\ | tests?:?\s{{1,20}} | test\ (?:files|suites):?\s{{1,20}})?
    {_COUNT} (?P<more>(?:\s?[,;|]\s{{1,3}}{_COUNT}){{1,20}})?
    (?P<time>;?\ (?:finished\ )?in\ [\d.]{{1,12}}\ ?s(?:econds)?(?:\ \([\d:]{{1,12}}\))?
           | \ \([\d.]{{1,12}}(?:\ ?m?s)?\))?
    (?P<rule>\ ={{2,}})?[\s.]*$""",
    re.IGNORECASE | re.VERBOSE,
)
_FAILED_TESTS = re.compile(r"\b([1-9]\d*) (?:tests? )?(?:failed|failures?|errors?)\b", re.IGNORECASE)
_PASSED_TESTS = re.compile(r"\b[1-9]\d{0,8} (?:tests? )?passed\b", re.IGNORECASE)
_SUCCESS = re.compile(
    r"^\s*(?:OK \(\d{1,8} tests?\)|(?:\[INFO\] )?BUILD SUCCESS(?:FUL)?(?: in [\w. ]{1,30})?"
    r"|Your command ran successfully(?: and did not produce any output)?\.?)\s*$",
    re.IGNORECASE,
)
_ERROR_FIELDS = (
    "error",
    "errors",
    "exception",
    "is_error",
    "isError",
    "error_message",
    "errorMessage",
    "error_code",
    "errorCode",
)
_SUCCESS_FIELDS = ("success", "ok", "succeeded")
_STATUS_FIELDS = ("status", "status_code", "statusCode")


def find_failure(output: str) -> str | None:
    """The line (or the JSON field) that reports the tool's failure, None if there is none.

    Failure words in the middle of a text do not count: a tool may read about errors, or list them. An exit code or a
    count of failed tests counts only if it is a line by itself.
    """
    text = output.strip()
    if text[:1] in ("{", "[") and len(text) <= JSON_CHARS:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return _in_json(value)
    if len(text) > READ_CHARS:
        text = text[: READ_CHARS // 2] + "\n" + text[-READ_CHARS // 2 :]
    lines = [line[:LINE_CHARS] for line in text.splitlines()]
    if not lines:
        return None
    head = next(line for line in lines if line.strip())
    for line in [head, *lines[1:_LINES], *lines[max(_LINES, len(lines) - _LINES) :]]:
        code = _EXIT.search(line)
        if code is not None and int(code.group(1)) != 0 and len(lines) <= 2 * _LINES:
            return line
        returned = _RETURN_CODE.search(line)
        if returned is not None and int(returned.group(1)) != 0:
            return line
        if _SHELL.search(line) or _COMPILER.search(line):
            return line
        if _counts_tests(line) and _FAILED_TESTS.search(line):
            return line
    return head if _FAILURE_START.search(head) else None


def find_success(output: str) -> str | None:
    """The line (or the JSON field) that reports the tool's success; None if there is none, or a failure."""
    text = output.strip()
    if find_failure(text) is not None:
        return None
    if text[:1] == "{" and len(text) <= JSON_CHARS:
        try:
            return _success_in_json(json.loads(text))
        except (ValueError, RecursionError):
            pass
    for line in _read_lines(text):
        code = _EXIT.search(line) or _RETURN_CODE.search(line)
        if (code is not None and int(code.group(1)) == 0) or _SUCCESS.search(line):
            return line
        if _counts_tests(line) and _PASSED_TESTS.search(line):
            return line
    return None


def _counts_tests(line: str) -> bool:
    """True if a line is a test runner's summary: counts and nothing else, with a title, a time, a rule of `=`, or more
    than one count. A number of tests alone may stand in any text."""
    summary = _SUMMARY.search(line)
    return summary is not None and any(summary.groupdict().values())


def _success_in_json(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    for name in _SUCCESS_FIELDS:
        if value.get(name) is True:
            return json.dumps({name: True})
    for name in _STATUS_FIELDS:
        status = value.get(name)
        if status in ("ok", "success", "succeeded", "completed") or (
            isinstance(status, int) and not isinstance(status, bool) and 200 <= status <= 299
        ):
            return json.dumps({name: status})
    for name in ("exit_code", "returncode"):
        if isinstance(value.get(name), int) and not isinstance(value[name], bool) and value[name] == 0:
            return json.dumps({name: 0})
    return json.dumps({"isError": False}) if value.get("isError") is False else None


def _read_lines(text: str) -> list[str]:
    """The lines in which an output reports how it went: the first and the last _LINES, each cut."""
    if len(text) > READ_CHARS:
        text = text[: READ_CHARS // 2] + "\n" + text[-READ_CHARS // 2 :]
    lines = [line[:LINE_CHARS] for line in text.splitlines()]
    return [*lines[:_LINES], *lines[max(_LINES, len(lines) - _LINES) :]]


def _in_json(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    for name in _ERROR_FIELDS:
        if value.get(name):
            return json.dumps({name: value[name]}, ensure_ascii=False)
    for name in _SUCCESS_FIELDS:
        if value.get(name) is False:
            return json.dumps(value, ensure_ascii=False)
    for name in _STATUS_FIELDS:
        status = value.get(name)
        failed = status in ("error", "failed", "failure", "timeout")
        if failed or (isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599):
            return json.dumps({name: status}, ensure_ascii=False)
    code = value.get("exit_code", value.get("returncode"))
    if isinstance(code, int) and code != 0:
        return json.dumps({"exit_code": code})
    return None
