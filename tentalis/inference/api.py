"""The HTTP routes of the inference server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from tentalis.inference import wire
from tentalis.inference.adapter_cache import AdapterCache, AdapterCacheFull
from tentalis.inference.chat_answer import ChatAnswer
from tentalis.inference.chat_prompt import ChatPrompt, InvalidMessages
from tentalis.inference.engine import InferenceEngine
from tentalis.inference.engine_bridge import Disconnected, EngineBridge, EngineStream, collect, unless_disconnected
from tentalis.inference.grammar import Grammar, GrammarCompiler, GrammarsBusy, InvalidGrammar
from tentalis.inference.jobs import EngineError, EngineStopped, GeneratedChunk, RequestFailed
from tentalis.inference.lora import AdapterMissing, AdapterRefused
from tentalis.inference.response_format import InvalidFormat
from tentalis.inference.scoring import ScoredTokens
from tentalis.inference.template_settings import reserved_message, reserved_settings
from tentalis.inference.text import longest_token_bytes, text_bytes
from tentalis.inference.time_limit import within
from tentalis.inference.whole_model import ServedVersion
from tentalis.service.packages import MissingExtra
from tentalis.storage.errors import StorageError
from tentalis.storage.location import BadLocation

_Body = TypeVar("_Body", bound=BaseModel)
_Read = TypeVar("_Read")

# A byte of text takes up to 6 bytes in JSON (\u0041); the rest is room for the JSON around the text.
_MAX_ESCAPED_BYTES, _BODY_OVERHEAD = 8, 1 << 20
# A body that is too large is read and dropped up to this size, so that the client can receive the error response.
_MAX_DISCARDED_BYTES = 256 << 20
# A larger body is parsed and tokenised on a thread: other clients' answers go on meanwhile.
_READ_ON_LOOP_BYTES = 64 << 10

TEMPLATE_LIMIT_S = 10.0
"""Time limit of a chat template, in seconds. Templates take milliseconds."""


class UnknownModelName(Exception):
    """The request names a model that is not served."""


class InferenceApi:
    """The routes of one engine. `served_name` is the base model's name, `max_model_len` the context in tokens."""

    def __init__(
        self, engine: InferenceEngine, adapters: AdapterCache, served_name: str, root: str, max_model_len: int
    ) -> None:
        self.engine = engine
        self.adapters = adapters
        self.served_name = served_name
        self.root = root
        self.max_model_len = max_model_len
        self.tokenizer = engine.runtime.tokenizer
        self.reserved_settings = reserved_settings(self.tokenizer)
        self.texts = wire.TokenTexts(self.tokenizer)
        self.chat_prompt = ChatPrompt(self.tokenizer.chat_template)
        self.grammars = GrammarCompiler(self.tokenizer, engine.runtime.vocab_size, engine.runtime.eos_token_ids)
        # Tokenising takes a hundred bytes of memory per byte of text, so text that cannot fit the context is refused
        # first.
        self.text_limit = max_model_len * longest_token_bytes(self.tokenizer)
        self.body_limit = _MAX_ESCAPED_BYTES * self.text_limit + _BODY_OVERHEAD

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
            AdapterCacheFull,
            StorageError,
            MissingExtra,
            GrammarsBusy,
            Disconnected,
        ):
            app.add_exception_handler(kind, _on_error)

    async def _parse(self, request: Request, kind: type[_Body]) -> _Body:
        """Parse the body as `kind`. Raises InvalidRequest if it is not JSON or longer than `body_limit`, Disconnected
        if the client disconnects before its end."""
        body, size = bytearray(), 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= self.body_limit:
                    body += chunk
                elif size > _MAX_DISCARDED_BYTES:
                    break
        except ClientDisconnect as error:
            raise Disconnected from error
        if size > self.body_limit:
            raise wire.InvalidRequest(
                f"The body has {'over ' if size > _MAX_DISCARDED_BYTES else ''}{size:,} bytes; with a context of "
                f"{self.max_model_len:,} tokens this server accepts at most {self.body_limit:,}."
            )
        request.state.large = size > _READ_ON_LOOP_BYTES
        return await _read(request, lambda: _parsed(body, kind))

    def _check_text(self, text: Any, param: str) -> None:
        """Raises InvalidRequest for lone surrogates, and for text that cannot fit the context in any tokenisation."""
        try:
            size = text_bytes(text)
        except UnicodeEncodeError as error:
            raise wire.InvalidRequest(f"{param} contains a lone surrogate: {error}", param) from error
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
        """The base model and its adapters; an adapter's card has the sha256 of the weight file as it was loaded."""
        card = {
            "object": "model",
            "created": 0,
            "owned_by": "tentalis",
            "max_model_len": self.max_model_len,
            # vLLM's name: of the distribution that was sampled from.
            "logprobs_mode": "processed_logprobs",
            "dtype": self.engine.runtime.dtype,
            # Our own: it loads adapters from the URLs of object stores, and whole models beside adapters.
            "loads_urls": True,
            "loads_models": True,
        }
        base = {"id": self.served_name, **card, "root": self.root, "parent": None}
        loaded = [
            {"id": a.name, **card, "root": a.path, "parent": self.served_name, "sha256": a.sha256}
            for a in self.adapters.all()
        ]
        return {"object": "list", "data": [base, *loaded]}

    async def load_adapter(self, request: Request) -> Response:
        """Serve a PEFT folder, or a folder with a whole model of the served model's shape, or either as a set of files
        in an object store, under the name `lora_name`."""
        body = await self._parse(request, wire.LoadAdapterBody)
        if body.lora_name == self.served_name:
            raise wire.InvalidRequest(f"{body.lora_name!r} is the base model's name.", "lora_name")
        if self.adapters.get(body.lora_name) is not None and not body.load_inplace:
            raise wire.InvalidRequest(
                f"The adapter {body.lora_name!r} is loaded already; unload it first, or set load_inplace.", "lora_name"
            )
        try:
            await asyncio.to_thread(self.adapters.load, body.lora_name, body.lora_path, body.sha256)
        except BadLocation as error:
            raise wire.InvalidRequest(str(error), "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """Stop serving an adapter; requests in flight finish with it."""
        body = await self._parse(request, wire.UnloadAdapterBody)
        if self.adapters.unload(body.lora_name) is None:
            raise UnknownModelName(f"The adapter {body.lora_name!r} is not loaded.")
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _resolve(self, name: str | None) -> tuple[str, ServedVersion | None]:
        if name is None or name == self.served_name:
            return self.served_name, None
        adapter = self.adapters.get(name)
        if adapter is None:
            served = [self.served_name, *(a.name for a in self.adapters.all())]
            raise UnknownModelName(f"The model {name!r} does not exist. Served: {', '.join(served)}.")
        return name, adapter

    # Tokens

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Convert text or chat messages to token ids."""
        body = await self._parse(request, wire.TokenizeBody)
        self._resolve(body.model)
        if body.messages is not None:
            messages = body.messages
            tokens = await self._rendered(messages, body)
        else:
            prompt, special = body.prompt, body.add_special_tokens is not False
            tokens = await _read(request, lambda: self._tokens(prompt, special))
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
        answer["token_strs"] = self.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return answer

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Convert token ids to text, special tokens written out."""
        body = await self._parse(request, wire.DetokenizeBody)
        self._resolve(body.model)
        self._check_ids(body.tokens)
        return {"prompt": self.tokenizer.decode(body.tokens)}

    async def _rendered(self, messages: list[dict[str, Any]], body: wire.ChatBody | wire.TokenizeBody) -> list[int]:
        """Renders on a thread, within TEMPLATE_LIMIT_S: a template is a program, and may never end."""
        try:
            return await within(TEMPLATE_LIMIT_S, lambda: self._render(messages, body))
        except TimeoutError as error:
            raise wire.InvalidRequest(
                f"The model's chat template takes longer than {TEMPLATE_LIMIT_S:g} s with these messages. Send fewer "
                "or shorter messages; if short ones fail too, repair the chat template in the model's folder.",
                "messages",
            ) from error

    def _render(self, messages: list[dict[str, Any]], body: wire.ChatBody | wire.TokenizeBody) -> list[int]:
        """The token ids of the chat template's output. The template writes its own special tokens: none are added."""
        if not self.tokenizer.chat_template:
            raise wire.InvalidRequest("This model's tokenizer has no chat template; use /v1/completions.", "messages")
        if "chat_template" in (body.chat_template_kwargs or {}):
            raise wire.InvalidRequest(wire.TEMPLATE_REFUSED, "messages")
        if refusal := reserved_message(body.chat_template_kwargs, self.reserved_settings):
            raise wire.InvalidRequest(refusal, "chat_template_kwargs")
        if len(messages) > self.max_model_len:
            raise wire.InvalidRequest(
                f"This model's context is {self.max_model_len:,} tokens, and a message takes at least one; there are "
                f"{len(messages):,} messages.",
                "messages",
            )
        self._check_text([messages, body.tools, body.chat_template_kwargs], "messages")
        try:
            prepared, tools = self.chat_prompt.prepared(messages, body.tools)
            return list(
                self.tokenizer.apply_chat_template(
                    prepared,
                    tools=tools,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    tokenize=True,
                    return_dict=False,
                    **(body.chat_template_kwargs or {}),
                )
            )
        except InvalidMessages as error:
            raise wire.InvalidRequest(str(error), "messages") from error
        except Exception as error:
            # A template is a program that comes with the model: these messages cause any exception it raises.
            raise wire.InvalidRequest(
                f"The chat template rejects these messages: {type(error).__name__}: {error}", "messages"
            ) from error

    def _tokens(self, prompt: Any, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        self._check_text(prompt, "prompt")
        return list(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def _prompts(self, body: wire.CompletionBody) -> list[list[int]]:
        """The token ids of each prompt, text tokenised. Raises InvalidRequest, also for ids outside the vocabulary."""
        for raw_prompt in body.prompts():
            self._check_text(raw_prompt, "prompt")
        prompts = [
            prompt
            if isinstance(prompt, list)
            else list(self.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens))
            for prompt in body.prompts()
        ]
        for prompt in prompts:
            self._check_ids(prompt)
        return prompts

    def _check_ids(self, tokens: list[int]) -> None:
        limit = self.engine.runtime.vocab_size
        invalid = next((token for token in tokens if token >= limit), None)
        if invalid is not None:
            raise wire.InvalidRequest(f"Token id {invalid} is outside the vocabulary of {limit}.", "prompt")

    def _token_budget(self, prompt: list[int], wanted: int | None) -> int:
        """The number of tokens that may be sampled after `prompt`. Raises InvalidRequest if they do not fit."""
        if not prompt:
            raise wire.InvalidRequest("The prompt is empty.", "prompt")
        available = self.max_model_len - len(prompt)
        if available < (1 if wanted is None else wanted):
            requested = "" if wanted is None else f" and {wanted} new ones are requested"
            raise wire.InvalidRequest(
                f"This model's context is {self.max_model_len} tokens; the prompt has {len(prompt)}{requested}. "
                "Shorten the prompt or lower max_tokens.",
                "max_tokens" if wanted and len(prompt) < self.max_model_len else "prompt",
            )
        return available if wanted is None else wanted

    # Completions

    async def _grammar(self, request: Request, body: wire.SamplingBody) -> Grammar | None:
        """The compiled form that the answer must have. Raises InvalidRequest, GrammarsBusy, MissingExtra."""
        param = "response_format" if body.response_format is not None else "tools"
        try:
            source = await _read(request, body.grammar)
            return None if source is None else await self.grammars.compile(source)
        except InvalidFormat as error:
            raise wire.InvalidRequest(str(error), error.param) from error
        except InvalidGrammar as error:
            raise wire.InvalidRequest(f"{param} cannot be served: {error}", param) from error
        except RecursionError as error:
            raise wire.InvalidRequest(f"{param} is nested too deeply.", param) from error

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._parse(request, wire.ChatBody)
        name, adapter = self._resolve(body.model)
        prompt = await self._rendered(body.messages, body)
        self._check_ids(prompt)
        top = (body.top_logprobs or 0) if body.logprobs else None
        budget = self._token_budget(prompt, body.limit)
        params = body.params(budget, top, await self._grammar(request, body))
        bridge = EngineBridge(self.engine)
        bridge.generate(0, prompt, params, body.samples, adapter, bool(body.stream))
        if body.stream:
            return EngineStream(bridge, _events(self._chat_stream(bridge, body, name, prompt)))
        with bridge:
            [chunks], _ = await unless_disconnected(request, collect(bridge, 1))
        written = ChatAnswer(body, self.texts)
        choices = [written.choice(chunk, self._text(chunk)) for chunk in chunks]
        answer = wire.envelope("chat.completion", wire.new_id("chatcmpl"), name)
        answer |= {"choices": choices, "usage": wire.usage(len(prompt), sum(len(c.token_ids) for c in chunks))}
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt
        return JSONResponse(answer)

    async def _chat_stream(
        self, bridge: EngineBridge, body: wire.ChatBody, name: str, prompt: list[int]
    ) -> AsyncIterator[dict[str, Any]]:
        shared_fields = wire.envelope("chat.completion.chunk", wire.new_id("chatcmpl"), name)
        for index in range(body.samples):
            delta = {"role": "assistant", "content": ""}
            first = shared_fields | {
                "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
            }
            yield first | ({"prompt_token_ids": prompt} if body.return_token_ids and index == 0 else {})
        sampled_tokens = 0
        written = ChatAnswer(body, self.texts)
        async for _, chunk in bridge.results():
            assert isinstance(chunk, GeneratedChunk)
            sampled_tokens += len(chunk.token_ids)
            yield shared_fields | {"choices": [written.chunk(chunk)]}
        if body.include_usage:
            yield shared_fields | {"choices": [], "usage": wire.usage(len(prompt), sampled_tokens)}

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions: sample after prompts, score prompts, or both."""
        body = await self._parse(request, wire.CompletionBody)
        name, adapter = self._resolve(body.model)
        prompts = await _read(request, lambda: self._prompts(body))
        if not prompts:
            raise wire.InvalidRequest("The prompt is empty.", "prompt")
        budgets = [self._token_budget(prompt, body.max_tokens) for prompt in prompts]
        grammar = await self._grammar(request, body)
        sampling = [body.params(budget, body.logprobs, grammar) for budget in budgets]
        bridge = EngineBridge(self.engine)
        with ExitStack() as cleanup:
            cleanup.enter_context(bridge)
            for prompt_index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
                if params.max_tokens:
                    bridge.generate(prompt_index, prompt, params, body.samples, adapter, bool(body.stream))
                if body.prompt_top is not None:
                    bridge.score(prompt_index, prompt, body.prompt_logprobs_temperature, body.prompt_top, adapter)
            if body.stream:
                cleanup.pop_all()  # EngineStream exits the bridge
                return EngineStream(bridge, _events(self._completion_stream(bridge, body, name, prompts)))
            chunks, scores = await unless_disconnected(request, collect(bridge, len(prompts)))
        choices = []
        for prompt_index, prompt in enumerate(prompts):
            samples = chunks[prompt_index] or [
                GeneratedChunk(index, [], [], [], "", "length", None) for index in range(body.samples)
            ]
            scored = scores.get(prompt_index)
            for chunk in samples:
                choices.append(self._completion_choice(body, prompt_index, prompt, chunk, scored))
        answer = wire.envelope("text_completion", wire.new_id("cmpl"), name)
        sampled_tokens = sum(len(chunk.token_ids) for prompt_index in chunks for chunk in prompt_index)
        answer |= {"choices": choices, "usage": wire.usage(sum(map(len, prompts)), sampled_tokens)}
        return JSONResponse(answer)

    def _completion_choice(
        self,
        body: wire.CompletionBody,
        prompt_index: int,
        prompt: list[int],
        chunk: GeneratedChunk,
        scored: ScoredTokens | None,
    ) -> dict[str, Any]:
        text, token_ids = self._text(chunk), chunk.token_ids
        logprobs: list[float | None] = list(chunk.logprobs)
        top = chunk.top or [[] for _ in chunk.token_ids]
        if body.echo:
            text, token_ids = str(self.tokenizer.decode(prompt, skip_special_tokens=True)) + text, prompt + token_ids
            if scored is not None:
                logprobs = [None, *scored.logprobs.tolist()[1:], *logprobs]
                top = [*scored.top, *top]
        choice: dict[str, Any] = {"index": prompt_index * body.samples + chunk.index, "text": text, "logprobs": None}
        if body.logprobs is not None:
            as_ids = body.return_tokens_as_token_ids
            choice["logprobs"] = wire.completion_logprobs(token_ids, logprobs, top, self.texts, as_ids, 0)
        choice |= wire.choice_end(chunk, body)
        if scored is not None:
            choice["prompt_logprobs"] = wire.prompt_logprobs(prompt, scored, self.texts)
            choice["prompt_logprobs_temperature"] = body.prompt_logprobs_temperature
        if body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": prompt}
        return choice

    async def _completion_stream(
        self, bridge: EngineBridge, body: wire.CompletionBody, name: str, prompts: list[list[int]]
    ) -> AsyncIterator[dict[str, Any]]:
        shared_fields = wire.envelope("text_completion", wire.new_id("cmpl"), name)
        sampled_tokens = 0
        offsets: dict[int, int] = {}  # choice index -> characters sent so far
        async for prompt_index, chunk in bridge.results():
            assert isinstance(chunk, GeneratedChunk)
            sampled_tokens += len(chunk.token_ids)
            index = prompt_index * body.samples + chunk.index
            choice: dict[str, Any] = {"index": index, "text": chunk.text or "", "logprobs": None}
            if body.return_token_ids and index not in offsets:
                choice["prompt_token_ids"] = prompts[prompt_index]
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
            yield shared_fields | {"choices": [choice | wire.choice_end(chunk, body)]}
        if body.include_usage:
            yield shared_fields | {"choices": [], "usage": wire.usage(sum(map(len, prompts)), sampled_tokens)}

    def _text(self, chunk: GeneratedChunk) -> str:
        if chunk.text is not None:
            return chunk.text
        return str(self.tokenizer.decode(chunk.token_ids, skip_special_tokens=True))


async def _read(request: Request, work: Callable[[], _Read]) -> _Read:
    """Returns what `work` makes of a request's body: on a thread if the body is large."""
    return await asyncio.to_thread(work) if request.state.large else work()


def _parsed(data: bytes | bytearray, kind: type[_Body]) -> _Body:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise wire.InvalidRequest(f"The body is not JSON: {error}") from error
    return kind.model_validate(body)


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yields server-sent events. An engine error becomes an event, because the status has already been sent."""
    try:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except EngineError as error:
        status, kind = _status(error)
        yield f"data: {json.dumps(wire.error_body(status, kind, str(error)))}\n\n"
    yield "data: [DONE]\n\n"


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, UnknownModelName | AdapterMissing):
        return 404, "NotFoundError"
    if isinstance(error, wire.InvalidRequest | ValidationError | AdapterRefused | AdapterCacheFull | RequestFailed):
        return 400, "BadRequestError"
    if isinstance(error, StorageError | MissingExtra):
        return 424, "FailedDependencyError"
    if isinstance(error, EngineStopped | GrammarsBusy):
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
