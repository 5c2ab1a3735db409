"""Asks a chat model several times at once, for judges: any OpenAI-compatible endpoint will do.

A vote that fails, hangs or is cut off is None and holds no other up; one that nobody needs any more is cancelled. Only
when the endpoint itself is away does the whole question fail, with `ScorerAway`, so that what waits for the answer
waits on.
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
from tentalis.security import secret_of

log = logging.getLogger(__name__)

ANSWER_BYTES = 4 << 20
"""What an endpoint may answer to one vote: a model that is asked for a verdict has no more to say."""

# What is refused for the state or the configuration of the endpoint, and not for what is asked.
_AWAY = frozenset({401, 402, 403, 404, 405, 407, 408, 409, 421, 425, 429, 502, 503, 504})
_THOUGHT = "</think>"


class NoApiKey(Exception):
    """The environment variable that should hold an API key is not set, or holds something that is none."""


class Ending(StrEnum):
    """How a vote ended. `cut`: the model was stopped in mid-sentence, at max_tokens for one."""

    ANSWERED = "answered"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CUT = "cut"
    AWAY = "away"


class Endpoint(BaseModel):
    """A chat model behind an OpenAI-compatible endpoint.

    `url` is with or without /v1; `api_key_env` is the *name* of the environment variable (or of the variable without
    its _FILE) that holds the key; `time_limit_s` is one vote's; `extra` goes into the body of each request as it
    is (`{"chat_template_kwargs": {"enable_thinking": false}}`), null takes a field out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    model: Annotated[str, Field(min_length=1)]
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    time_limit_s: CallSeconds = 60.0
    extra: dict[str, Any] = {}

    @field_validator("url")
    @classmethod
    def _is_one(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ValueError("must not hold a user or a password, which would show up in logs: use api_key_env")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host")
        return url.rstrip("/").removesuffix("/v1")

    @field_validator("extra")
    @classmethod
    def _leaves_alone(cls, extra: dict[str, Any]) -> dict[str, Any]:
        taken = sorted({"messages", "model", "n", "stream"} & extra.keys())
        if taken:
            raise ValueError(f"must not hold {', '.join(taken)}: that is for whoever asks to say")
        return extra

    def api_key(self, env: Mapping[str, str] = os.environ) -> SecretStr | None:
        """The key, None where none is wanted. Raises NoApiKey or BadSecurity, without saying what it is."""
        if self.api_key_env is None:
            return None
        key = secret_of(env, self.api_key_env)
        if key is None:
            raise NoApiKey(f"{self.api_key_env} is not set: it should hold the API key for {self.url}")
        text = key.get_secret_value()
        # What cannot be a header would be quoted in the errors of the HTTP library.
        if not text.isascii() or not text.isprintable() or " " in text:
            raise NoApiKey(f"{self.api_key_env} holds characters that no API key has: a line break perhaps")
        return key


class Chat:
    """Asks one endpoint. How many questions are under way at once is the caller's affair.

    Raises NoApiKey or BadSecurity.
    """

    def __init__(self, endpoint: Endpoint, env: Mapping[str, str] = os.environ) -> None:
        self.endpoint = endpoint
        self.ended = dict.fromkeys(Ending, 0)
        """Votes so far, by how they ended."""
        self._key = endpoint.api_key(env)

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        """Made when it is first needed: loading the certificates takes its time."""
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key.get_secret_value()}"}
        return httpx.AsyncClient(
            base_url=self.endpoint.url,
            headers=headers,
            # A vote has its own time limit, over all of it; who does not even take the connection is away.
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
        """The texts of n independent answers, asked for at once; None for a vote that failed, took too long or was cut
        off. What a model thought aloud before its answer (up to the last `</think>`) is left out.

        Takes no longer than the endpoint's time limit.

        Args:
            enough: whether these votes will do. It is asked whenever one has ended and there is an answer among them;
                the open ones are then cancelled, and only these are returned.

        Raises:
            ScorerAway: no vote was answered, and at least one because the endpoint is away, overloaded, or refuses the
                credentials or the model.
        """
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            **self.endpoint.extra,
        }
        body = {name: value for name, value in body.items() if value is not None}
        votes: list[tuple[Ending, str]] = []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._vote(body)) for _ in range(n)]
            still_open = set(tasks)
            while still_open and not (enough is not None and _answered(votes) and enough(_answers(votes))):
                _, still_open = await asyncio.wait(still_open, return_when=asyncio.FIRST_COMPLETED)
                votes = [task.result() for task in tasks if task not in still_open]
            for task in still_open:
                task.cancel()
        for ending, text in votes:
            self._count(ending, text)
        away = [text for ending, text in votes if ending is Ending.AWAY]
        if away and not _answered(votes):
            raise ScorerAway(f"{self.endpoint.url}: {away[0]}")
        return _answers(votes)

    def _count(self, ending: Ending, text: str) -> None:
        """One more; of those that gave no answer the first, and then each tenfold, is logged."""
        count = self.ended[ending] = self.ended[ending] + 1
        if ending is not Ending.ANSWERED and count == 10 ** (len(str(count)) - 1):
            model, url = self.endpoint.model, self.endpoint.url
            log.warning("a vote of %s at %s: %s (%d so far): %s", model, url, ending.value, count, text)

    async def _vote(self, body: dict[str, Any]) -> tuple[Ending, str]:
        """How a vote ended, and the answer, or what was the matter."""
        limit = self.endpoint.time_limit_s
        try:
            async with asyncio.timeout(limit):
                return await self._answered(body)
        except TimeoutError:
            return Ending.TIMEOUT, f"no answer within {limit:g} s"
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return Ending.AWAY, repr(error)
        except (httpx.HTTPError, httpx.StreamError) as error:
            return Ending.FAILED, repr(error)

    async def _answered(self, body: dict[str, Any]) -> tuple[Ending, str]:
        read = bytearray()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for piece in response.aiter_bytes():
                read += piece
                if len(read) > ANSWER_BYTES:
                    return Ending.FAILED, f"more than {ANSWER_BYTES} bytes"
        status = response.status_code
        if status != 200:
            ending = Ending.AWAY if status in _AWAY or 300 <= status < 400 else Ending.FAILED
            return ending, f"status {status}: {self._quoted(read)}"
        try:
            choice = json.loads(read)["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return Ending.FAILED, f"this is no chat completion: {self._quoted(read)}"
        if not isinstance(text, str):
            return Ending.FAILED, f"the message has no text: {self._quoted(read)}"
        if reason == "length":
            return Ending.CUT, f"its {body.get('max_tokens')} tokens were not enough"
        return Ending.ANSWERED, text.rpartition(_THOUGHT)[2].strip()

    def _quoted(self, read: bytearray) -> str:
        """The beginning of an answer for the log, without the key that a server may echo."""
        text = read.decode(errors="replace")
        if self._key is not None:
            text = text.replace(self._key.get_secret_value(), "***")
        return repr(text[:200])


def _answered(votes: Sequence[tuple[Ending, str]]) -> bool:
    return any(ending is Ending.ANSWERED for ending, _ in votes)


def _answers(votes: Sequence[tuple[Ending, str]]) -> list[str | None]:
    return [text if ending is Ending.ANSWERED else None for ending, text in votes]
