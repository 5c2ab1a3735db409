"""Asks a chat model for several votes concurrently, for judges, through any OpenAI-compatible endpoint.

A vote that fails, hangs or is cut off is None and does not delay the others. A vote that is no longer needed is
cancelled. The whole question fails only if the endpoint itself is unavailable: `ScorerAway` tells the caller to ask
again later.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from types import TracebackType
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from tentalis.rewards.verdict import CallSeconds, ScorerAway
from tentalis.service.security import secret_of

log = logging.getLogger(__name__)

ANSWER_BYTES = 4 << 20
"""Size limit of the response to one vote, in bytes. A verdict needs no more."""

# Statuses caused by the state or the configuration of the endpoint, not by the content of the request.
_UNAVAILABLE_STATUSES = frozenset({401, 402, 403, 404, 405, 407, 408, 409, 421, 425, 429, 502, 503, 504})
_THINKING_END = "</think>"


class NoApiKey(Exception):
    """The environment variable for an API key is not set, or its value is not a valid key."""


class VoteEnding(StrEnum):
    """The end of a vote. `cut`: the model was stopped in mid-sentence, for example at max_tokens."""

    ANSWERED = "answered"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CUT = "cut"
    AWAY = "away"


class ChatEndpoint(BaseModel):
    """A chat model behind an OpenAI-compatible endpoint.

    `url` is with or without /v1. `api_key_env` is the *name* of the environment variable that holds the key; `NAME`
    also reads the file that `NAME_FILE` points to. `time_limit_s` limits one vote. `extra` is merged into the body of
    each request (`{"chat_template_kwargs": {"enable_thinking": false}}`); null removes a field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    model: Annotated[str, Field(min_length=1)]
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    time_limit_s: CallSeconds = 60.0
    extra: dict[str, Any] = {}

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ValueError("must not hold a user or a password, which would show up in logs: use api_key_env")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host")
        return url.rstrip("/").removesuffix("/v1")

    @field_validator("extra")
    @classmethod
    def _check_extra(cls, extra: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"messages", "model", "n", "stream"} & extra.keys())
        if taken:
            raise ValueError(f"must not hold {', '.join(taken)}: the judge sets these fields itself")
        return extra

    def api_key(self, env: Mapping[str, str] = os.environ) -> SecretStr | None:
        """Returns the key, None if none is configured. Raises NoApiKey or BadSecurity; the error omits the key."""
        if self.api_key_env is None:
            return None
        key = secret_of(env, self.api_key_env)
        if key is None:
            raise NoApiKey(f"{self.api_key_env} is not set: set it to the API key for {self.url}")
        text = key.get_secret_value()
        # The errors of the HTTP library would quote a value that cannot be a header.
        if not text.isascii() or not text.isprintable() or " " in text:
            raise NoApiKey(f"{self.api_key_env} holds characters that an API key cannot have, such as a line break")
        return key


class ChatClient:
    """Client of one endpoint. The caller limits the number of concurrent questions.

    Raises NoApiKey or BadSecurity.
    """

    def __init__(self, endpoint: ChatEndpoint, env: Mapping[str, str] = os.environ) -> None:
        self.endpoint = endpoint
        self.endings = dict.fromkeys(VoteEnding, 0)
        """Number of votes so far, by their end."""
        self._key = endpoint.api_key(env)

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        """The HTTP client, created on first use because loading the certificates is slow."""
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key.get_secret_value()}"}
        return httpx.AsyncClient(
            base_url=self.endpoint.url,
            headers=headers,
            # `_vote` limits the whole call. An endpoint that does not accept the connection is unavailable.
            timeout=httpx.Timeout(None, connect=min(10.0, self.endpoint.time_limit_s / 2)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        if "_http" in self.__dict__:
            await self._http.aclose()

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        n: int = 1,
        temperature: float = 0.6,
        max_tokens: int = 1024,
        enough: Callable[[Sequence[str | None]], bool] | None = None,
    ) -> list[str | None]:
        """Returns the texts of n independent answers, asked for concurrently.

        A vote that failed, took too long or was cut off is None. The model's reasoning before its answer (up to the
        last `</think>`) is removed. The call takes no longer than the endpoint's time limit.

        Args:
            enough: returns True if the votes so far suffice. It is called when a vote ends and at least one vote has
                an answer. If it returns True, the open votes are cancelled and only the ended ones are returned.

        Raises:
            ScorerAway: no vote was answered, and at least one because the endpoint is unavailable, overloaded, or
                refuses the credentials or the model.
        """
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            **self.endpoint.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        votes: list[tuple[VoteEnding, str]] = []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._vote(body)) for _ in range(n)]
            pending = set(tasks)
            while pending and not (enough is not None and _answered(votes) and enough(_answers(votes))):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                votes = [task.result() for task in tasks if task not in pending]
            for task in pending:
                task.cancel()
        for ending, text in votes:
            self._count(ending, text)
        unavailable = [text for ending, text in votes if ending is VoteEnding.AWAY]
        if unavailable and not _answered(votes):
            raise ScorerAway(f"{self.endpoint.url}: {unavailable[0]}")
        return _answers(votes)

    def _count(self, ending: VoteEnding, text: str) -> None:
        """Counts a vote; logs the 1st, 10th, 100th, ... vote without an answer of each kind."""
        count = self.endings[ending] = self.endings[ending] + 1
        if ending is not VoteEnding.ANSWERED and count == 10 ** (len(str(count)) - 1):
            model, url = self.endpoint.model, self.endpoint.url
            log.warning("no answer to a vote by %s at %s: %s (%d so far): %s", model, url, ending.value, count, text)

    async def _vote(self, body: dict[str, Any]) -> tuple[VoteEnding, str]:
        """Returns the end of a vote with its answer, or with the reason why there is none."""
        limit = self.endpoint.time_limit_s
        try:
            async with asyncio.timeout(limit):
                return await self._answered(body)
        except TimeoutError:
            return VoteEnding.TIMEOUT, f"no answer within {limit:g} s"
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return VoteEnding.AWAY, repr(error)
        except (httpx.HTTPError, httpx.StreamError) as error:
            return VoteEnding.FAILED, repr(error)

    async def _answered(self, body: dict[str, Any]) -> tuple[VoteEnding, str]:
        content = bytearray()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > ANSWER_BYTES:
                    return VoteEnding.FAILED, f"more than {ANSWER_BYTES} bytes"
        status = response.status_code
        if status != 200:
            ending = VoteEnding.AWAY if status in _UNAVAILABLE_STATUSES or 300 <= status < 400 else VoteEnding.FAILED
            return ending, f"status {status}: {self._quoted(content)}"
        try:
            choice = json.loads(content)["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return VoteEnding.FAILED, f"the response is not a chat completion: {self._quoted(content)}"
        if not isinstance(text, str):
            return VoteEnding.FAILED, f"the message has no text: {self._quoted(content)}"
        if reason == "length":
            return VoteEnding.CUT, f"cut off at max_tokens ({body.get('max_tokens')})"
        return VoteEnding.ANSWERED, text.rpartition(_THINKING_END)[2].strip()

    def _quoted(self, content: bytearray) -> str:
        """Returns the beginning of a response for the log, without the key, which a server may echo."""
        text = content.decode(errors="replace")
        if self._key is not None:
            text = text.replace(self._key.get_secret_value(), "***")
        return repr(text[:200])


def _answered(votes: Sequence[tuple[VoteEnding, str]]) -> bool:
    return any(ending is VoteEnding.ANSWERED for ending, _ in votes)


def _answers(votes: Sequence[tuple[VoteEnding, str]]) -> list[str | None]:
    return [text if ending is VoteEnding.ANSWERED else None for ending, text in votes]
