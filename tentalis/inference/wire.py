"""Request and response bodies in the format of vLLM's OpenAI-compatible server."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tentalis.inference.grammar import Grammar
from tentalis.inference.jobs import GeneratedChunk
from tentalis.inference.response_format import answer_grammar
from tentalis.inference.sampling import SamplingParams
from tentalis.inference.scoring import ScoredTokens

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_TokenId = Annotated[int, Field(ge=0)]
_MAX_TOP_LOGPROBS = 20
_MAX_SAMPLES = 256
# JSON has no infinity; vLLM writes this instead.
_LOWEST_LOGPROB = -9999.0

# Unsupported parameters that would change the samples -> the values that mean "not used".
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "repetition_penalty": (None, 1),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}


# A template is a program. Only the model's own is run.
TEMPLATE_REFUSED = "chat_template is not allowed: the model's own template is used."


class InvalidRequest(Exception):
    """A parameter is out of range, or requests an unsupported feature."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _RenderedBody(BaseModel):
    """A request body. Unknown fields are ignored, as in vLLM, except a template."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _refuse_template(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("chat_template") is not None:
            raise ValueError(TEMPLATE_REFUSED)
        return data


class _Body(_RenderedBody):
    """A request for tokens. Fields that would change the samples are refused too."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, unused in _UNSUPPORTED.items():
                if name in data and data[name] not in unused:
                    raise ValueError(f"{name} is not supported by this server (got {data[name]!r})")
        return data


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class SamplingBody(_Body):
    """The fields that chat and plain completions share."""

    model: str | None = None
    n: int | None = Field(1, ge=1, le=_MAX_SAMPLES)
    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: _Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    response_format: Any = None

    @property
    def samples(self) -> int:
        """Completions per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def grammar(self) -> str | None:
        """The grammar of the answer, None if it may be any text. Raises InvalidFormat."""
        return answer_grammar(self.response_format)

    def params(self, max_tokens: int, top_logprobs: int | None, grammar: Grammar | None = None) -> SamplingParams:
        """The engine's sampling parameters; omitted ones mean the model's own distribution."""
        if grammar is not None and self.ignore_eos:
            raise InvalidRequest("ignore_eos cannot be combined with a response_format or a forced tool.", "ignore_eos")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(not text for text in stop):
            raise InvalidRequest("A stop string must not be empty.", "stop")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            include_stop=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            grammar=grammar,
        )


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(0, ge=0, le=_MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _check(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to sample; None means as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def may_call(self) -> bool:
        """True if the model may call a tool: calls in its text become `tool_calls`."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def untagged_tools(self) -> set[str]:
        """The tools that an answer without tags may call: none, if the answer has a form anyway."""
        if self.response_format not in (None, {"type": "text"}) or self.tool_choice not in (None, "auto"):
            return set()
        functions = (tool.get("function") for tool in self.tools or ())
        named = (function.get("name") for function in functions if isinstance(function, dict))
        return {name for name in named if isinstance(name, str)}

    def grammar(self) -> str | None:
        """The grammar of the answer, None if it may be any text. Raises InvalidFormat."""
        return answer_grammar(self.response_format, self.tools, self.tool_choice)


class CompletionBody(SamplingBody):
    """POST /v1/completions. `prompt_logprobs_temperature` is our extension: the temperature of the scores."""

    prompt: str | list[_TokenId] | list[str] | list[list[_TokenId]]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=_MAX_TOP_LOGPROBS)
    echo: bool | None = False
    prompt_logprobs: int | None = Field(None, ge=0, le=_MAX_TOP_LOGPROBS)
    prompt_logprobs_temperature: float = Field(1.0, gt=0, le=100)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 (0 is for echo=true, which scores the prompt only)")
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            raise ValueError("echo and prompt_logprobs are not available when stream=true")
        return self

    @property
    def prompt_top(self) -> int | None:
        """Alternatives per prompt token; None means that the prompt is not scored."""
        if self.prompt_logprobs is not None:
            return self.prompt_logprobs
        return self.logprobs if self.echo else None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list; a single prompt becomes a list of one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast(list[str] | list[list[int]], self.prompt)


class TokenizeBody(_RenderedBody):
    """POST /tokenize: a text or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[_TokenId]


class LoadAdapterBody(BaseModel):
    """POST /v1/load_lora_adapter. Our extensions: `lora_path` may be the URL of a set of files in an object store, and
    `sha256` is that of the weights, which the adapter must have."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    sha256: str | None = None


class UnloadAdapterBody(BaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)


class TokenTexts:
    """The text of single tokens, decoded once each."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token: int, as_id: bool | None = False) -> str:
        if as_id:
            return f"token_id:{token}"
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = str(self._tokenizer.decode([token]))
        return text


def new_id(prefix: str) -> str:
    """An id for a response."""
    return f"{prefix}-{uuid.uuid4().hex}"


def envelope(kind: str, identifier: str, model: str) -> dict[str, Any]:
    """The fields that every response begins with. `model` is the model or adapter that sampled."""
    return {"id": identifier, "object": kind, "created": int(time.time()), "model": model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts of a request; a prompt counts once for any n."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def error_body(status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    """An error body in vLLM's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def choice_end(chunk: GeneratedChunk, body: SamplingBody) -> dict[str, Any]:
    """The last fields of a choice: why it ended, and its token ids if the request wants them."""
    end: dict[str, Any] = {"finish_reason": chunk.finish_reason, "stop_reason": chunk.stop_reason}
    return end | ({"token_ids": chunk.token_ids} if body.return_token_ids else {})


def chat_logprobs(chunk: GeneratedChunk, texts: TokenTexts, as_ids: bool | None) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = texts(token, as_ids)
        return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(text.encode())}

    content = []
    for index, (token, logprob) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
        top = chunk.top[index] if chunk.top else []
        content.append(entry(token, logprob) | {"top_logprobs": [entry(*other) for other in top]})
    return {"content": content}


def completion_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[Sequence[tuple[int, float]]],
    texts: TokenTexts,
    as_ids: bool | None,
    offset: int,
) -> dict[str, Any]:
    """The `logprobs` object of a plain completion; `offset` is where its text begins, in characters."""
    strings = [texts(token, as_ids) for token in tokens]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(texts(token))
    tops: list[dict[str, float] | None] = []
    for token, logprob, others in zip(tokens, logprobs, top, strict=True):
        if logprob is None:
            tops.append(None)
            continue
        alternatives = {texts(other, as_ids): max(value, _LOWEST_LOGPROB) for other, value in others}
        tops.append(alternatives | {texts(token, as_ids): max(logprob, _LOWEST_LOGPROB)})
    clipped = [None if value is None else max(value, _LOWEST_LOGPROB) for value in logprobs]
    return {"text_offset": offsets, "token_logprobs": clipped, "tokens": strings, "top_logprobs": tops}


def prompt_logprobs(tokens: Sequence[int], scored: ScoredTokens, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` list: None for the first token, then per token {id: {logprob, rank, decoded_token}}."""
    entries: list[dict[str, Any] | None] = [None]
    values = scored.logprobs.tolist()
    for index in range(1, len(tokens)):
        alternatives = [(token, value, rank) for rank, (token, value) in enumerate(scored.top[index], 1)]
        entries.append(
            {
                str(token): {"logprob": max(value, _LOWEST_LOGPROB), "rank": rank, "decoded_token": texts(token)}
                for token, value, rank in [*alternatives, (tokens[index], values[index], scored.ranks[index])]
            }
        )
    return entries
