"""An environment variable as a setting: its name, the values that it allows, its default and its meaning. Pure."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from tentalis.service.exit_codes import ExitCode

T = TypeVar("T")
Value = TypeVar("Value", covariant=True)
HIDDEN = "***"
HIGHEST_PORT = 65_535
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class BadVariable(ValueError):
    """A variable's value is not allowed. The message names the variable, the value and what is allowed; no secret."""


@dataclass(frozen=True)
class ValueKind(Generic[Value]):
    """A kind of value.

    Attributes:
        allowed: the allowed values, in words that follow "give".
        parse: turns a text into the value. Raises ValueError; its message, if any, is added to the error.
        least: the smallest allowed number.
        most: the largest allowed number.
    """

    allowed: str
    parse: Callable[[str], Value]
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable.

    Attributes:
        name: its full name.
        kind: the values that it allows.
        default: its value if it is unset or empty.
        meaning: what it sets, in one or two sentences.
        used_by: the processes and commands that read it.
        default_text: the default in words, where it depends on something else.
        secret: its value is never shown.
        internal: set by a process for its children, not by people.
    """

    name: str
    kind: ValueKind[T]
    default: T
    meaning: str
    used_by: str
    default_text: str = ""
    secret: bool = False
    internal: bool = False

    def read(self, env: Mapping[str, str] | None = None) -> T:
        """Returns the value in an environment, by default that of this process. Raises BadVariable."""
        text = (os.environ if env is None else env).get(self.name)
        return self.parse(text) if text else self.default

    def parse(self, text: str) -> T:
        """Converts a text to the value. Raises BadVariable."""
        try:
            return self.kind.parse(text)
        except ValueError as error:
            raise BadVariable(self.problem(text, str(error))) from error

    def problem(self, text: str, why: str = "") -> str:
        """The message for a value that is not allowed."""
        return f"{self.name}={self.shown(text)}: give {self.kind.allowed}{f' ({why})' if why else ''}"

    def shown(self, text: str) -> str:
        """The text as people may see it."""
        return HIDDEN if self.secret else text

    @property
    def default_shown(self) -> str:
        """The default in words; empty if there is none."""
        if self.default_text or self.default is None:
            return self.default_text
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def _inside(value: float, least: float | None, most: float | None) -> None:
    if not math.isfinite(value) or (least is not None and value < least) or (most is not None and value > most):
        raise ValueError


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return "" if least is None else f", at least {least:g}"
    return f" from {least:g} to {most:g}" if most < 1e6 else f" from {least:g} to {most:,.0f}"


def whole(least: int, most: int | None = None) -> ValueKind[int]:
    """A whole number."""

    def parse(text: str) -> int:
        if re.fullmatch(r"\s*[+-]?\d{1,18}\s*", text) is None:
            raise ValueError
        _inside(value := int(text), least, most)
        return value

    return ValueKind(f"a whole number{_range(least, most)}", parse, least, most)


def number(least: float, most: float | None = None, unit: str = "") -> ValueKind[float]:
    """A number."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError from None
        _inside(value, least, most)
        return value

    return ValueKind(f"a number{f' of {unit}' if unit else ''}{_range(least, most)}", parse, least, most)


def one_of(*words: str, any_case: bool = False) -> ValueKind[str]:
    """One of several words; with `any_case` in small letters too, and the value is spelled as here."""

    def parse(text: str) -> str:
        word = text.upper() if any_case else text
        if word not in words:
            raise ValueError
        return word

    return ValueKind(f"{', '.join(words[:-1])} or {words[-1]}", parse)


def exit_codes() -> ValueKind[frozenset[int]]:
    """Exit codes of processes, separated by commas."""

    def parse(text: str) -> frozenset[int]:
        codes = frozenset(map(whole(0, 255).parse, text.split(",")))
        if not codes <= frozenset(ExitCode):
            raise ValueError
        return codes

    return ValueKind("exit codes of Tentalis, separated by commas, such as 5,7", parse)


def matching(pattern: str, allowed: str) -> ValueKind[str]:
    """The kind of a text that must match a regular expression; `allowed` describes it for the error message."""

    def parse(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError
        return text

    return ValueKind(allowed, parse)


def _truth(text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise ValueError
    return _TRUTH[text.lower()]


def _servers(text: str) -> str:
    for server in text.split(","):
        host, colon, port = server.rpartition(":")
        if not colon:
            host, port = server, "9092"
        in_brackets = host.startswith("[") and host.endswith("]")
        if not host.strip() or "/" in host or " " in server or (":" in host and not in_brackets):
            raise ValueError
        if not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) <= HIGHEST_PORT:
            raise ValueError
    return text


def _web_address(text: str) -> str:
    found = urlsplit(text)
    if found.scheme not in ("http", "https") or not found.hostname or found.port == 0:
        raise ValueError
    return text


def _web_addresses(text: str) -> str:
    addresses = [_web_address(each.strip()).rstrip("/").removesuffix("/v1") for each in text.split(",")]
    if len(set(addresses)) != len(addresses):
        raise ValueError("an address is given twice")
    return text


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise ValueError("no such file" if not path.exists() else "not a file")
    return path


TEXT: ValueKind[str] = ValueKind("a text", str)
PATH: ValueKind[Path] = ValueKind("a path", Path)
FILE: ValueKind[Path] = ValueKind("the path of a file that exists", _file)
TRUTH: ValueKind[bool] = ValueKind("true or false", _truth)
PORT = whole(0, HIGHEST_PORT)
SERVERS: ValueKind[str] = ValueKind(
    f"host:port[,host:port] with ports from 1 to {HIGHEST_PORT}, without a scheme", _servers
)
WEB_ADDRESS: ValueKind[str] = ValueKind("a URL of the form http://host:port or https://host:port", _web_address)
WEB_ADDRESSES: ValueKind[str] = ValueKind(
    "a URL of the form http://host:port or https://host:port, or several, separated by commas", _web_addresses
)
