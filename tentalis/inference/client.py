"""HTTP client of the protocol, for vLLM, `tentalis serve model`, and other servers with OpenAI's API.

The client asks for token ids and log-probs in vLLM's dialect. A server that ignores or refuses that still generates;
its samples have no tokens.
"""

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import httpx
import numpy as np

from schemas.records import LogprobsMode
from tentalis.inference.logprobs_check import measure_logprobs, settled
from tentalis.inference.protocol import (
    Completion,
    Float32,
    Generation,
    InferenceError,
    Int32,
    Message,
    NotTokenExact,
    RequestRefused,
    ServerUnavailable,
    UnknownModel,
)
from tentalis.inference.replicas.probe import listed_models

log = logging.getLogger(__name__)

# Sent explicitly: a server may fill missing parameters with its model's own generation defaults.
_BARE: dict[str, Any] = {"min_p": 0.0, "repetition_penalty": 1.0}
# Parameters of which not every server knows the name, and without which it can still answer.
_DIALECT = {*_BARE, "return_token_ids", "logprobs", "top_logprobs"}
# vLLM's names of the distributions; its other modes give logits.
_MODES = {"processed_logprobs": LogprobsMode.PROCESSED, "raw_logprobs": LogprobsMode.RAW}

# Statuses of a server, or of a proxy before it, that is busy, restarts or does not answer.
_AWAY = frozenset({408, 429, 502, 503, 504})


class OpenAIClient:
    """An `Inference` at `base_url` (with or without a trailing /v1). Close it, or use it as `async with`.

    `timeout` bounds a whole call in seconds. `logprobs_mode`: the distribution of the server's log-probs, raw or
    processed; None: as the server declares it in its model cards. `check_logprobs`: compare that once with what the
    server does, and record what was measured. The client never retries: only the caller knows if repeating a call is
    safe.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout: float = 300.0,
        logprobs_mode: LogprobsMode | None = None,
        check_logprobs: bool = False,
    ) -> None:
        self._logprobs_mode = logprobs_mode
        self._unchecked = check_logprobs
        self._checking = asyncio.Lock()
        self._warned: set[str] = set()
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # No pool limit: the caller decides how many calls run at once, and a queue here would hide the waiting calls.
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(10.0, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def generate(
        self,
        model: str,
        prompt: Sequence[Message] | Sequence[int],
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """See Inference.generate. Without `max_tokens` a completion may fill the server's context."""
        body: dict[str, Any] = {
            "model": model,
            "n": n,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "return_token_ids": True,
            **_BARE,
        }
        if seed is not None:
            body["seed"] = seed
        if stop:
            body["stop"] = list(stop)
        if _is_messages(prompt):
            body |= {"messages": list(prompt), "logprobs": True, "top_logprobs": 0}
            if max_tokens is not None:
                body["max_completion_tokens"] = max_tokens
            answer = await self._post_samples("/v1/chat/completions", body)
            return await self._chat_generation(answer)
        ids = [int(token) for token in cast(Sequence[int], prompt)]
        if max_tokens is None:  # /v1/completions would stop after 16 tokens
            max_tokens = (await self._max_model_len(model)) - len(ids)
        body |= {"prompt": ids, "logprobs": 0, "max_tokens": max_tokens}
        answer = await self._post_samples("/v1/completions", body)
        return await self._completions_generation(answer, ids)

    async def score(self, model: str, token_ids: Sequence[int], temperature: float = 1.0) -> Float32:
        """See Inference.score. RequestRefused if `temperature` is not 1 and the server scores only at 1 (vLLM)."""
        ids, entries = await self._prompt_logprobs(model, token_ids, temperature, 0)
        return self._own(ids, entries)

    async def score_top(
        self, model: str, token_ids: Sequence[int], temperature: float = 1.0, k: int = 1
    ) -> tuple[Float32, Int32, Float32]:
        """See Inference.score_top. RequestRefused as in `score`, NotTokenExact if the server lists fewer than k."""
        ids, entries = await self._prompt_logprobs(model, token_ids, temperature, k)
        top_ids = np.full((len(ids), k), -1, dtype=np.int32)
        top_logprobs = np.full((len(ids), k), np.nan, dtype=np.float32)
        for position in range(1, len(ids)):
            try:
                listed = [
                    (entry["rank"], int(token), float(entry["logprob"])) for token, entry in entries[position].items()
                ]
                ranked = sorted(listed)[:k]
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise self._strange(position) from error
            if len(ranked) < k:
                raise NotTokenExact(f"{self.base_url} lists only {len(ranked)} of the {k} requested top tokens.")
            top_ids[position] = [token for _, token, _ in ranked]
            top_logprobs[position] = [logprob for _, _, logprob in ranked]
        return self._own(ids, entries), top_ids, top_logprobs

    def _own(self, ids: Sequence[int], entries: Sequence[Any]) -> Float32:
        """The log-probs of the given tokens, NaN for the first."""
        scores = np.full(len(ids), np.nan, dtype=np.float32)
        for position in range(1, len(ids)):
            try:
                scores[position] = entries[position][str(ids[position])]["logprob"]
            except (LookupError, TypeError, ValueError) as error:
                raise self._strange(position) from error
        return scores

    def _strange(self, position: int) -> NotTokenExact:
        return NotTokenExact(f"{self.base_url} returned no readable log-prob for token {position}.")

    async def _prompt_logprobs(
        self, model: str, token_ids: Sequence[int], temperature: float, top: int
    ) -> tuple[list[int], list[Any]]:
        """The token ids, and the server's entry for each: {id: {logprob, rank}}, None for the first."""
        ids = [int(token) for token in token_ids]
        body: dict[str, Any] = {
            "model": model,
            "prompt": ids,
            "max_tokens": 0,
            "echo": True,  # vLLM accepts max_tokens 0 only with echo
            "prompt_logprobs": top,
            "prompt_logprobs_temperature": temperature,
            "return_token_ids": True,
        }
        answer = await self._post("/v1/completions", body)
        choice = _choices(answer)[0]
        if temperature != 1.0 and choice.get("prompt_logprobs_temperature") != temperature:
            raise RequestRefused(400, f"{self.base_url} scores at temperature 1 only; {temperature} was requested.")
        entries = choice.get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise NotTokenExact(f"{self.base_url} did not return prompt_logprobs for each of {len(ids)} tokens.")
        return ids, entries

    async def render(
        self,
        model: str,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> Int32:
        """See Inference.render (POST /tokenize)."""
        body = {"model": model, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return await self._tokens(body | dict(template or {}))

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Int32:
        """Token ids of plain text, int32 [n]."""
        body = {"model": model, "prompt": text, "add_special_tokens": add_special_tokens}
        return await self._tokens(body)

    async def _tokens(self, body: dict[str, Any]) -> Int32:
        answer = await self._post("/tokenize", body)
        try:
            return _int32(answer["tokens"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise NotTokenExact(f"{self.base_url}/tokenize returned no token ids.") from error

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""
        answer = await self._post("/detokenize", {"model": model, "tokens": [int(token) for token in token_ids]})
        return str(answer["prompt"])

    async def load_adapter(self, name: str, path: str, in_place: bool = False, sha256: str | None = None) -> None:
        """Serve the PEFT folder `path` (on the server's file system, or a URL for `tentalis serve model`) as `name`.
        RequestRefused if it cannot. `sha256`: of the weights, for `tentalis serve model` to check."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": in_place}
        await self._send("POST", "/v1/load_lora_adapter", body if sha256 is None else body | {"sha256": sha256})

    async def unload_adapter(self, name: str) -> None:
        """Stop serving `name`; requests in flight finish with it. UnknownModel if it is not loaded."""
        await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def models(self) -> list[dict[str, Any]]:
        """The model cards of /v1/models: the base, then its adapters (`parent` set)."""
        return list((await self._send("GET", "/v1/models", None)).json()["data"])

    async def probe(self) -> list[str] | None:
        """The names of the models that it lists, None if it is not healthy. Raises nothing."""
        return await listed_models(self._http)

    async def healthy(self) -> bool:
        """True if the server answers /health with 200."""
        try:
            await self._send("GET", "/health", None)
        except (ServerUnavailable, RequestRefused):
            return False
        return True

    async def _max_model_len(self, model: str) -> int:
        cards = {card["id"]: card for card in await self.models()}
        if model not in cards:
            raise UnknownModel(404, f"The model {model!r} is not served. Served: {sorted(cards)}.")
        length = cards[model].get("max_model_len") or cards[cards[model]["parent"]].get("max_model_len")
        if length is None:
            raise RequestRefused(400, "Set max_tokens: the server does not report its context length.")
        return int(length)

    async def _post_samples(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts a request for samples. If the server refuses a parameter of the dialect by name, posts it without."""
        try:
            return await self._post(path, body)
        except RequestRefused as refusal:
            plain = {name: body[name] for name in body if name not in _DIALECT and (name != "top_k" or body[name])}
            named = [name for name in body if name not in plain and name in refusal.message]
            if refusal.status not in (400, 422) or not named:
                raise
            self._warn(f"{self.base_url} refuses {named[0]}: it is asked for neither token ids nor log-probs")
            return await self._post(path, plain)

    async def _mode(self) -> LogprobsMode:
        """The distribution of the server's log-probs, cached. UNKNOWN if it does not answer; the next call retries."""
        async with self._checking:
            try:
                declared = self._logprobs_mode
                if declared is None:
                    declared = declared_mode(await self.models())
                mode = await self._measured_mode(declared) if self._unchecked else declared
            except (InferenceError, LookupError, TypeError, ValueError):
                return LogprobsMode.UNKNOWN
            if self._logprobs_mode is None and mode is LogprobsMode.UNKNOWN:
                self._warn(
                    f"{self.base_url} does not declare the distribution of its log-probs: its answers are scored, but "
                    "not trained on; set --logprobs-mode"
                )
            self._logprobs_mode, self._unchecked = mode, False
            return mode

    async def checked_mode(self, declared: LogprobsMode) -> tuple[LogprobsMode, str]:
        """Compares `declared` with the samples of the base model. Returns the mode to record, and a message for the
        operator, "" if there is no problem. Raises ServerUnavailable, RequestRefused: nothing was measured."""
        try:
            base = next((str(card["id"]) for card in await self.models() if card.get("parent") is None), None)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotTokenExact(f"{self.base_url}/v1/models does not list its models") from error
        if base is None:
            raise NotTokenExact(f"{self.base_url}/v1/models lists no base model")
        probe = copy.copy(self)  # the same connections; its samples are not recorded, so it needs no mode
        probe._logprobs_mode, probe._unchecked, probe._checking = LogprobsMode.UNKNOWN, False, asyncio.Lock()
        return settled(declared, await measure_logprobs(probe, base))

    async def _measured_mode(self, declared: LogprobsMode) -> LogprobsMode:
        mode, problem = await self.checked_mode(declared)
        if problem:
            self._warn(f"{self.base_url} {problem}")
        return mode

    def _warn(self, message: str) -> None:
        """Logs a warning once."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)

    async def _chat_generation(self, answer: dict[str, Any]) -> Generation:
        completions = []
        for choice in _choices(answer):
            entries = (choice.get("logprobs") or {}).get("content")
            completions.append(
                self._completion(
                    choice,
                    choice["message"].get("content") or "",
                    None if entries is None else [entry["logprob"] for entry in entries],
                )
            )
        return await self._generation(answer, answer.get("prompt_token_ids"), completions)

    async def _completions_generation(self, answer: dict[str, Any], prompt: list[int]) -> Generation:
        completions = []
        for choice in _choices(answer):
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
            completions.append(self._completion(choice, choice["text"], logprobs))
        return await self._generation(answer, prompt, completions)

    def _completion(self, choice: dict[str, Any], text: str, logprobs: list[float] | None) -> Completion:
        ids, finish_reason = choice.get("token_ids"), str(choice.get("finish_reason") or "")
        if ids is None or (logprobs is not None and len(ids) != len(logprobs)):
            return Completion(text, None, None, finish_reason)
        values = None if logprobs is None else np.asarray(logprobs, dtype=np.float32)
        return Completion(text, _int32(ids), values, finish_reason)

    async def _generation(
        self, answer: dict[str, Any], prompt: list[int] | None, completions: list[Completion]
    ) -> Generation:
        model = str(answer["model"])
        if prompt is None or any(each.token_ids is None for each in completions):
            self._warn(f"{self.base_url} gives no token ids: its answers are scored, but not trained on")
        if prompt is None:
            without = [Completion(each.text, None, None, each.finish_reason) for each in completions]
            return Generation(model, None, without, LogprobsMode.NONE)
        exact = any(each.logprobs is not None for each in completions)
        return Generation(model, _int32(prompt), completions, await self._mode() if exact else LogprobsMode.NONE)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._send("POST", path, body)
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise RequestRefused(502, f"{self.base_url}{path} did not answer with a JSON object.")
        return answer

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise ServerUnavailable(f"{self.base_url}{path} did not answer in time ({error!r}).") from error
        except httpx.RequestError as error:
            raise ServerUnavailable(f"{self.base_url}{path}: {error!r}. Is the inference server running?") from error
        if response.status_code in _AWAY:
            raise ServerUnavailable(f"{self.base_url}{path} answered {response.status_code}: {_message(response)}")
        if response.status_code == 404:
            raise UnknownModel(404, _message(response))
        if response.is_error:
            raise RequestRefused(response.status_code, _message(response))
        return response


def declared_mode(cards: Sequence[Mapping[str, Any]]) -> LogprobsMode:
    """Returns the distribution of a server's log-probs that its model cards declare.

    `tentalis serve model` declares it. vLLM does not: it counts as raw, which is vLLM's default. Every other server
    that declares nothing counts as unknown.
    """
    named = {card.get("logprobs_mode") for card in cards}
    if named == {None}:
        by_vllm = {card.get("owned_by") for card in cards} == {"vllm"}
        return LogprobsMode.RAW if by_vllm else LogprobsMode.UNKNOWN
    modes = {
        _MODES.get(name, LogprobsMode.UNKNOWN) if isinstance(name, str) else LogprobsMode.UNKNOWN for name in named
    }
    return modes.pop() if len(modes) == 1 else LogprobsMode.UNKNOWN


def _is_messages(prompt: Sequence[Message] | Sequence[int]) -> bool:
    if not prompt:
        raise RequestRefused(400, "The prompt is empty.")
    return isinstance(prompt[0], dict)


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        choices = sorted(answer.get("choices") or [], key=lambda choice: int(choice["index"]))
    except (LookupError, TypeError, ValueError) as error:
        raise NotTokenExact("The server returned choices without an index.") from error
    if not choices:
        raise RequestRefused(502, "The server returned no choices.")
    return choices


def _int32(values: Sequence[int]) -> Int32:
    return np.asarray(values, dtype=np.int32)


def _message(response: httpx.Response) -> str:
    """The message of an OpenAI-style error body, or the raw text of any other body."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


__all__ = ["InferenceError", "OpenAIClient", "RequestRefused", "ServerUnavailable", "UnknownModel"]
