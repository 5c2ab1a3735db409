"""The HTTP routes of the inference server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ValidationError

from tentalis.inference import wire
from tentalis.inference.engine import Engine
from tentalis.inference.exchange import Disconnected, Exchange, ExchangeStream, collect, unless_disconnected
from tentalis.inference.jobs import Chunk, EngineError, EngineStopped
from tentalis.inference.lora import Adapter, AdapterMissing, AdapterRefused
from tentalis.inference.scoring import ScoredTokens
from tentalis.inference.shelf import Adapters, ShelfFull
from tentalis.inference.text import longest_token_bytes, text_bytes

_Body = TypeVar("_Body", bound=BaseModel)

# A byte of text takes up to 6 of JSON (\u0041); the rest is for what stands around it.
_ESCAPED, _BODY_ROOM = 8, 1 << 20
# A refused body is read to its end and dropped, so that the client can hear the answer; but not for ever.
_HEARD_OUT = 256 << 20


class UnknownModelName(Exception):
    """The request names a model that is not served."""


class Api:
    """The routes over one engine. `served_name` is the base model's name, `max_model_len` the context in tokens."""

    def __init__(self, engine: Engine, adapters: Adapters, served_name: str, root: str, max_model_len: int) -> None:
        self.engine = engine
        self.adapters = adapters
        self.served_name = served_name
        self.root = root
        self.max_model_len = max_model_len
        self.tokenizer = engine.runtime.tokenizer
        self.texts = wire.TokenTexts(self.tokenizer)
        # Tokenising takes a hundred bytes of memory for each of text: what cannot fit the context is refused before.
        self.text_limit = max_model_len * longest_token_bytes(self.tokenizer)
        self.body_limit = _ESCAPED * self.text_limit + _BODY_ROOM

    def install(self, app: FastAPI) -> None:
        """Add the routes and the error shapes to `app`."""
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"])
        app.add_api_route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_exception_handler(Exception, _on_error)
        for kind in (
            UnknownModelName,
            wire.InvalidRequest,
            ValidationError,
            EngineError,
            AdapterRefused,
            ShelfFull,
            Disconnected,
        ):
            app.add_exception_handler(kind, _on_error)

    async def _parse(self, request: Request, kind: type[_Body]) -> _Body:
        """Raises InvalidRequest, also for a body that is longer than any that could be answered."""
        body, size = bytearray(), 0
        async for chunk in request.stream():
            size += len(chunk)
            if size <= self.body_limit:
                body += chunk
            elif size > _HEARD_OUT:
                break
        if size > self.body_limit:
            raise wire.InvalidRequest(
                f"The body has {'over ' if size > _HEARD_OUT else ''}{size:,} bytes; with a context of "
                f"{self.max_model_len:,} tokens this server takes {self.body_limit:,}."
            )
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise wire.InvalidRequest(f"The body is not JSON: {error}") from error
        return kind.model_validate(data)

    def _bounded(self, text: Any, param: str) -> None:
        """Refuses what is too long for the context however it is tokenised, and what is no text."""
        try:
            size = text_bytes(text)
        except UnicodeEncodeError as error:
            raise wire.InvalidRequest(f"{param} holds a lone surrogate, which is no text: {error}", param) from error
        except RecursionError as error:
            raise wire.InvalidRequest(f"{param} is nested too deeply.", param) from error
        if size > self.text_limit:
            raise wire.InvalidRequest(
                f"This model's context is {self.max_model_len} tokens, at most {self.text_limit:,} bytes of text; "
                f"{param} has {size:,} bytes. Shorten it.",
                param,
            )

    # Models and adapters

    async def health(self) -> Response:
        """200 while requests are served."""
        return Response(status_code=200 if self.engine.alive else 503)

    async def models(self) -> dict[str, Any]:
        """The base model and its adapters; an adapter's card carries the sha256 of the weight file as it was read."""
        card = {"object": "model", "created": 0, "owned_by": "tentalis", "max_model_len": self.max_model_len}
        base = {"id": self.served_name, **card, "root": self.root, "parent": None}
        loaded = [
            {"id": a.name, **card, "root": a.path, "parent": self.served_name, "sha256": a.sha256}
            for a in self.adapters.all()
        ]
        return {"object": "list", "data": [base, *loaded]}

    async def load_adapter(self, request: Request) -> Response:
        """Serve a PEFT folder under a name of its own."""
        body = await self._parse(request, wire.LoadAdapterBody)
        if body.lora_name == self.served_name:
            raise wire.InvalidRequest(f"{body.lora_name!r} is the base model's name.", "lora_name")
        if self.adapters.get(body.lora_name) is not None and not body.load_inplace:
            raise wire.InvalidRequest(
                f"The adapter {body.lora_name!r} is loaded already; unload it first, or set load_inplace.", "lora_name"
            )
        await asyncio.to_thread(self.adapters.load, body.lora_name, Path(body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Stop serving an adapter; answers in flight are finished with it."""
        body = await self._parse(request, wire.UnloadAdapterBody)
        if self.adapters.unload(body.lora_name) is None:
            raise UnknownModelName(f"The adapter {body.lora_name!r} is not loaded.")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _resolve(self, name: str | None) -> tuple[str, Adapter | None]:
        if name is None or name == self.served_name:
            return self.served_name, None
        adapter = self.adapters.get(name)
        if adapter is None:
            served = [self.served_name, *(a.name for a in self.adapters.all())]
            raise UnknownModelName(f"The model {name!r} does not exist. Served: {', '.join(served)}.")
        return name, adapter

    # Tokens

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Text or chat messages to token ids."""
        body = await self._parse(request, wire.TokenizeBody)
        self._resolve(body.model)
        if body.messages is not None:
            tokens = self._render(body.messages, body)
        else:
            self._bounded(body.prompt, "prompt")
            special = body.add_special_tokens is not False
            tokens = list(self.tokenizer.encode(body.prompt, add_special_tokens=special))
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
        answer["token_strs"] = self.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return answer

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Token ids to text, special tokens written out."""
        body = await self._parse(request, wire.DetokenizeBody)
        self._resolve(body.model)
        self._check_ids(body.tokens)
        return {"prompt": self.tokenizer.decode(body.tokens)}

    def _render(self, messages: list[dict[str, Any]], body: wire.ChatBody | wire.TokenizeBody) -> list[int]:
        """The chat template's token ids. Its special tokens are its own affair: none are added."""
        if not self.tokenizer.chat_template:
            raise wire.InvalidRequest("This model's tokenizer has no chat template; use /v1/completions.", "messages")
        self._bounded([messages, body.tools, body.chat_template_kwargs], "messages")
        try:
            return list(
                self.tokenizer.apply_chat_template(
                    [_plain(message) for message in messages],
                    tools=body.tools,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    tokenize=True,
                    return_dict=False,
                    **(body.chat_template_kwargs or {}),
                )
            )
        except wire.InvalidRequest:
            raise
        except Exception as error:
            # Templates are programs that came with the model: what they raise is about these messages.
            raise wire.InvalidRequest(
                f"The chat template refuses these messages: {type(error).__name__}: {error}", "messages"
            ) from error

    def _check_ids(self, tokens: list[int]) -> None:
        limit = self.engine.runtime.vocab_size
        wrong = next((token for token in tokens if token >= limit), None)
        if wrong is not None:
            raise wire.InvalidRequest(f"Token id {wrong} is outside the vocabulary of {limit}.", "prompt")

    def _room(self, prompt: list[int], wanted: int | None) -> int:
        """How many tokens may be sampled after `prompt`."""
        if not prompt:
            raise wire.InvalidRequest("The prompt is empty.", "prompt")
        room = self.max_model_len - len(prompt)
        if room < (1 if wanted is None else wanted):
            asked = "" if wanted is None else f" and {wanted} are to be sampled"
            raise wire.InvalidRequest(
                f"This model's context is {self.max_model_len} tokens; the prompt has {len(prompt)}{asked}. "
                "Shorten the prompt or lower max_tokens.",
                "max_tokens" if wanted and len(prompt) < self.max_model_len else "prompt",
            )
        return room if wanted is None else wanted

    # Completions

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._parse(request, wire.ChatBody)
        name, adapter = self._resolve(body.model)
        prompt = self._render(body.messages, body)
        self._check_ids(prompt)
        top = (body.top_logprobs or 0) if body.logprobs else None
        params = body.params(self._room(prompt, body.limit), top)
        exchange = Exchange(self.engine)
        exchange.generate(0, prompt, params, body.samples, adapter, bool(body.stream))
        if body.stream:
            return ExchangeStream(exchange, _events(self._chat_stream(exchange, body, name, prompt)))
        with exchange:
            [chunks], _ = await unless_disconnected(request, collect(exchange, 1))
        choices = [
            {"index": chunk.index, "message": {"role": "assistant", "content": self._text(chunk)}}
            | self._chat_choice(chunk, body)
            for chunk in chunks
        ]
        answer = wire.envelope("chat.completion", wire.new_id("chatcmpl"), name)
        answer |= {"choices": choices, "usage": wire.usage(len(prompt), sum(len(c.token_ids) for c in chunks))}
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt
        return JSONResponse(answer)

    def _chat_choice(self, chunk: Chunk, body: wire.ChatBody) -> dict[str, Any]:
        logprobs = wire.chat_logprobs(chunk, self.texts, body.return_tokens_as_token_ids) if body.logprobs else None
        return {"logprobs": logprobs} | _choice_end(chunk, body)

    async def _chat_stream(
        self, exchange: Exchange, body: wire.ChatBody, name: str, prompt: list[int]
    ) -> AsyncIterator[dict[str, Any]]:
        head = wire.envelope("chat.completion.chunk", wire.new_id("chatcmpl"), name)
        for index in range(body.samples):
            delta = {"role": "assistant", "content": ""}
            first = head | {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
            yield first | ({"prompt_token_ids": prompt} if body.return_token_ids and index == 0 else {})
        sampled = 0
        async for _, chunk in exchange.results():
            assert isinstance(chunk, Chunk)
            sampled += len(chunk.token_ids)
            delta = {"content": chunk.text or ""}
            yield head | {"choices": [{"index": chunk.index, "delta": delta} | self._chat_choice(chunk, body)]}
        if body.include_usage:
            yield head | {"choices": [], "usage": wire.usage(len(prompt), sampled)}

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions: sample after prompts, score prompts, or both."""
        body = await self._parse(request, wire.CompletionBody)
        name, adapter = self._resolve(body.model)
        for given in body.prompts():
            self._bounded(given, "prompt")
        prompts = [
            prompt
            if isinstance(prompt, list)
            else list(self.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens))
            for prompt in body.prompts()
        ]
        if not prompts:
            raise wire.InvalidRequest("The prompt is empty.", "prompt")
        sampling = []
        for prompt in prompts:
            self._check_ids(prompt)
            sampling.append(body.params(self._room(prompt, body.max_tokens), body.logprobs))
        exchange = Exchange(self.engine)
        with ExitStack() as cleanup:
            cleanup.enter_context(exchange)
            for place, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
                if params.max_tokens:
                    exchange.generate(place, prompt, params, body.samples, adapter, bool(body.stream))
                if body.prompt_top is not None:
                    exchange.score(place, prompt, body.prompt_logprobs_temperature, body.prompt_top, adapter)
            if body.stream:
                cleanup.pop_all()  # the stream leaves it
                return ExchangeStream(exchange, _events(self._completion_stream(exchange, body, name, prompts)))
            chunks, scores = await unless_disconnected(request, collect(exchange, len(prompts)))
        choices = []
        for place, prompt in enumerate(prompts):
            samples = chunks[place] or [Chunk(index, [], [], [], "", "length", None) for index in range(body.samples)]
            scored = scores.get(place)
            for chunk in samples:
                choices.append(self._completion_choice(body, place, prompt, chunk, scored))
        answer = wire.envelope("text_completion", wire.new_id("cmpl"), name)
        sampled = sum(len(chunk.token_ids) for place in chunks for chunk in place)
        answer |= {"choices": choices, "usage": wire.usage(sum(map(len, prompts)), sampled)}
        return JSONResponse(answer)

    def _completion_choice(
        self, body: wire.CompletionBody, place: int, prompt: list[int], chunk: Chunk, scored: ScoredTokens | None
    ) -> dict[str, Any]:
        text, token_ids = self._text(chunk), chunk.token_ids
        logprobs: list[float | None] = list(chunk.logprobs)
        top = chunk.top or [[] for _ in chunk.token_ids]
        if body.echo:
            text, token_ids = str(self.tokenizer.decode(prompt, skip_special_tokens=True)) + text, prompt + token_ids
            if scored is not None:
                logprobs = [None, *scored.logprobs.tolist()[1:], *logprobs]
                top = [*scored.top, *top]
        choice: dict[str, Any] = {"index": place * body.samples + chunk.index, "text": text, "logprobs": None}
        if body.logprobs is not None:
            as_ids = body.return_tokens_as_token_ids
            choice["logprobs"] = wire.completion_logprobs(token_ids, logprobs, top, self.texts, as_ids, 0)
        choice |= _choice_end(chunk, body)
        if scored is not None:
            choice["prompt_logprobs"] = wire.prompt_logprobs(prompt, scored, self.texts)
            choice["prompt_logprobs_temperature"] = body.prompt_logprobs_temperature
        if body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": prompt}
        return choice

    async def _completion_stream(
        self, exchange: Exchange, body: wire.CompletionBody, name: str, prompts: list[list[int]]
    ) -> AsyncIterator[dict[str, Any]]:
        head = wire.envelope("text_completion", wire.new_id("cmpl"), name)
        sampled = 0
        offsets: dict[int, int] = {}  # characters of each choice sent so far
        async for place, chunk in exchange.results():
            assert isinstance(chunk, Chunk)
            sampled += len(chunk.token_ids)
            index = place * body.samples + chunk.index
            choice: dict[str, Any] = {"index": index, "text": chunk.text or "", "logprobs": None}
            if body.return_token_ids and index not in offsets:
                choice["prompt_token_ids"] = prompts[place]
            offset = offsets.get(index, 0)
            offsets[index] = offset + sum(len(self.texts(token)) for token in chunk.token_ids)
            if body.logprobs is not None:
                choice["logprobs"] = wire.completion_logprobs(
                    chunk.token_ids,
                    chunk.logprobs,
                    chunk.top or [],
                    self.texts,
                    body.return_tokens_as_token_ids,
                    offset,
                )
            yield head | {"choices": [choice | _choice_end(chunk, body)]}
        if body.include_usage:
            yield head | {"choices": [], "usage": wire.usage(sum(map(len, prompts)), sampled)}

    def _text(self, chunk: Chunk) -> str:
        if chunk.text is not None:
            return chunk.text
        return str(self.tokenizer.decode(chunk.token_ids, skip_special_tokens=True))


def _choice_end(chunk: Chunk, body: wire.SamplingBody) -> dict[str, Any]:
    end: dict[str, Any] = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
    return end | ({"token_ids": chunk.token_ids} if body.return_token_ids else {})


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Server-sent events; an error in the middle becomes an event, since the status is sent already."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except EngineError as error:
        status, kind = _status(error)
        yield f"data: {json.dumps(wire.error_body(status, kind, str(error)))}\n\n"
    yield "data: [DONE]\n\n"


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Content given as a list of text parts becomes one text; templates of text models know nothing else."""
    content = message.get("content")
    if "role" not in message:
        raise wire.InvalidRequest("Every message needs a role.", "messages")
    if not isinstance(content, list):
        return message if content is not None else message | {"content": ""}
    wrong = [part.get("type") for part in content if part.get("type") != "text"]
    if wrong:
        raise wire.InvalidRequest(f"Content of type {wrong[0]!r} is not supported: this is a text model.", "messages")
    return message | {"content": "".join(part["text"] for part in content)}


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, UnknownModelName | AdapterMissing):
        return 404, "NotFoundError"
    if isinstance(error, wire.InvalidRequest | ValidationError | AdapterRefused | ShelfFull):
        return 400, "BadRequestError"
    if isinstance(error, EngineStopped):
        return 503, "ServiceUnavailableError"
    if isinstance(error, Disconnected):
        return 499, "ClientClosedRequest"
    return 500, "InternalServerError"


async def _on_error(request: Request, error: Exception) -> Response:
    status, kind = _status(error)
    message, param = str(error), None
    if isinstance(error, wire.InvalidRequest):
        param = error.param
    elif isinstance(error, ValidationError):
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        message = f"{param}: {first['msg']}" if param else first["msg"]
    elif status == 404 and isinstance(error, UnknownModelName):
        param = "model"
    return JSONResponse(wire.error_body(status, kind, message, param), status_code=status)
