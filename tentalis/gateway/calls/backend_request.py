"""Builds the request to a backend: the client's, plus token ids and a known sampling distribution. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.bounds import MAX_TEMPERATURE, MIN_TEMPERATURE, trainable_temperature
from schemas.records import LogprobsMode, Sampling
from tentalis.gateway.backends.routing import CallRoute
from tentalis.gateway.calls.capture import AnswerCapture, RequestedFields
from tentalis.gateway.calls.session_id import BODY_FIELDS
from tentalis.gateway.http.errors import APIError
from tentalis.inference.chat_messages import unseen
from tentalis.inference.template_settings import RESERVED_SETTINGS, reserved_message

# Sent explicitly, because a server may fill missing fields with its model's own generation defaults.
_MODEL_DISTRIBUTION: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_NEUTRAL_PENALTIES: dict[str, float] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
}
_BIASES = ("logit_bias", "bad_words", "allowed_token_ids")
# Parameters that select one of several answers: the answer is then not a sample of the model's distribution.
_NEUTRAL_SELECTION: dict[str, Any] = {"use_beam_search": False, "best_of": 1}
# Finish reasons of an answer that the backend aborted (vLLM, SGLang).
_ABORTED = ("abort", "error")
UNSEEN = "a message holds images, sounds or files, which its tokens do not say"
_GRAMMARS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_TOKENIZER_ARGUMENTS = RESERVED_SETTINGS - {"chat_template"}
# Recorded as max_tokens if the request sets no limit.
_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """A request body for a backend, and the fields that the client itself wants. `n`: choices in the answer."""

    body: dict[str, Any]
    requested: RequestedFields
    n: int
    stream: bool


def backend_request(body: Mapping[str, Any], route: CallRoute, *, chat: bool, tokens: bool) -> BackendRequest:
    """Builds the body to send. `tokens`: ask for token ids and log-probs, and pin the sampling distribution; only for
    backends that can give them. Raises APIError (400)."""
    sent = {name: value for name, value in body.items() if name not in BODY_FIELDS}
    n = sent.get("n")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise APIError(400, "n must be a whole number of at least 1")
    prompts = 1 if chat else _prompts(sent.get("prompt"))
    stream = sent.get("stream")
    if not (stream is None or isinstance(stream, bool)):
        raise APIError(400, "stream must be true or false")
    options = sent.get("stream_options")
    if not (options is None or isinstance(options, dict)):
        raise APIError(400, "stream_options must be an object")
    requested = RequestedFields(
        logprobs=bool(sent.get("logprobs")) if chat else sent.get("logprobs") is not None,
        token_ids=bool(sent.get("return_token_ids")),
        usage=bool((options or {}).get("include_usage")),
    )
    if route.model is not None:
        sent["model"] = route.model
    if route.sampling is not None:
        for name in (*_NEUTRAL_PENALTIES, *_BIASES, *_NEUTRAL_SELECTION, "top_k"):
            sent.pop(name, None)
        sent |= {"temperature": route.sampling.temperature, "top_p": 1.0}
    if tokens:
        if route.policy:
            sent = _MODEL_DISTRIBUTION | {name: value for name, value in sent.items() if value is not None}
        sent["return_token_ids"] = True
        if not requested.logprobs:
            sent["logprobs"] = True if chat else 0
    return BackendRequest(sent, requested, (n or 1) * prompts, bool(stream))


def check_template_settings(body: Mapping[str, Any], *, client_templates: bool) -> None:
    """Raises APIError (400) for a request that sets an argument of the backend's tokenizer, and, unless
    `client_templates`, for one that brings its own chat template: a program that the backend would run."""
    settings = body.get("chat_template_kwargs")
    if not (settings is None or isinstance(settings, dict)):
        raise APIError(400, "chat_template_kwargs must be an object")
    own_template = body.get("chat_template") is not None or "chat_template" in (settings or {})
    if own_template and not client_templates:
        raise APIError(
            400,
            "chat_template is not allowed here: the model's own template is used. An operator allows it by the "
            "gateway's setting client_templates",
        )
    if refusal := reserved_message(settings, _TOKENIZER_ARGUMENTS):
        raise APIError(400, refusal)


def _prompts(prompt: Any) -> int:
    """The number of prompts in a plain completion: several in a list of strings or of token id lists."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return len(prompt) if several else 1


def refuses_token_ids(status: int, text: str) -> bool:
    """True if an error names a parameter that the gateway has added, so that the server may not support it."""
    parameters = ("return_token_ids", "logprobs", "top_k", "min_p", "repetition_penalty")
    return status in (400, 422) and any(parameter in text for parameter in parameters)


def sampling_of(sent: Mapping[str, Any]) -> Sampling | None:
    """The sampling parameters of a body; None if they are invalid and cannot be recorded."""
    stop = sent.get("stop")
    limit = sent.get("max_completion_tokens") or sent.get("max_tokens") or _UNBOUNDED
    try:
        return Sampling(
            temperature=1.0 if sent.get("temperature") is None else sent["temperature"],
            top_p=1.0 if sent.get("top_p") is None else sent["top_p"],
            top_k=max(0, sent.get("top_k") or 0),
            max_tokens=limit,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            constrained=constrained(sent),
        )
    except (ValueError, TypeError):
        return None


def constrained(sent: Mapping[str, Any]) -> bool:
    """True if a grammar or a forced tool constrains the tokens."""
    response_format = sent.get("response_format")
    forced = sent.get("tool_choice") not in (None, "none", "auto")
    plain = response_format is None or (isinstance(response_format, dict) and response_format.get("type") == "text")
    return forced or not plain or any(sent.get(name) for name in _GRAMMARS)


def not_trainable_reason(
    sent: Mapping[str, Any],
    route: CallRoute,
    capture: AnswerCapture,
    *,
    tokens: bool,
    n: int,
    mode: LogprobsMode | None,
) -> str:
    """Returns the reason why a turn cannot be trained on, as readable text; "" if it can. `mode`: the distribution of
    the log-probs of the replica that answered, None if it is not known."""
    if reason := untrainable_request_reason(sent, route, tokens=tokens, n=n, mode=mode):
        return reason
    if not capture.has_token_ids:
        return _no_token_ids(route)
    if capture.encoded_tokens() is None:
        return f"the backend {route.backend.name} gave token ids and log-probs that do not fit together"
    if capture.finish_reason in _ABORTED:
        return f"the answer is a part of one: the backend {route.backend.name} gave it up ({capture.finish_reason})"
    return ""


def _no_token_ids(route: CallRoute) -> str:
    return f"the backend {route.backend.name} gives no token ids"


def untrainable_request_reason(
    sent: Mapping[str, Any], route: CallRoute, *, tokens: bool, n: int, mode: LogprobsMode | None
) -> str:
    """Returns the reason why no answer to this request can be trained on; "" if it depends on the answer."""
    if not route.policy:
        return "no policy was asked for: a plain model answered"
    if route.substitute:
        wanted = route.instead_of or route.policy
        return f"the fallback {route.backend.name} answered with {route.model} instead of {wanted}"
    if route.unserved:
        return f"no version of {route.policy} is served yet: the base model answered"
    if not tokens:
        return _no_token_ids(route)
    if unseen(sent.get("messages") or ()):
        return UNSEEN
    if sent.get("echo"):
        return "the answer repeats the prompt (echo)"
    if n != 1:
        return f"{n} answers were asked for: which of them the client used is not known"
    if selection := _first_set(sent, _NEUTRAL_SELECTION):
        return f"the answer is the best of several and was not sampled ({selection})"
    sampling = sampling_of(sent)
    if sampling is None:
        return "the sampling parameters cannot be recorded"
    if sampling.temperature == 0:
        return "sampled greedily (temperature 0)"
    if not trainable_temperature(sampling.temperature):
        return f"temperature {sampling.temperature:g} is not from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "truncated sampling (top_p or top_k)"
    if sampling.constrained:
        return "a grammar or a forced tool constrained the sampling"
    if _is_biased(sent):
        return "penalties or biases bent the distribution"
    return _mode_reason(sent, route, sampling, mode)


def _mode_reason(sent: Mapping[str, Any], route: CallRoute, sampling: Sampling, mode: LogprobsMode | None) -> str:
    """The reason why log-probs of this distribution are not those of the sampling, "" if they are."""
    name = route.backend.name
    if mode is None:
        return f"the log-probs of the backend {name} are not measured yet"
    match logprobs_mode(sent, mode):
        case LogprobsMode.PROCESSED:
            return ""
        case LogprobsMode.RAW:
            declared = route.backend.logprobs_mode
            measured = "" if declared is LogprobsMode.RAW else f", as measured; it is declared as {declared.value}"
            return (
                f"the backend {name} gives log-probs of the bare model (logprobs_mode: raw{measured}), "
                f"which at temperature {sampling.temperature:g} are not those of the sampling"
            )
        case _:
            return f"the backend {name} gives log-probs of neither the bare model nor the sampling"


def logprobs_mode(sent: Mapping[str, Any], mode: LogprobsMode) -> LogprobsMode:
    """The distribution of the log-probs in an answer of a replica whose log-probs are of `mode`. At temperature 1,
    without truncation, penalties or biases, the bare model's distribution and the sampled one are the same."""
    sampling = sampling_of(sent)
    if mode is not LogprobsMode.RAW or sampling is None or sampling.constrained or _is_biased(sent):
        return mode
    unrestricted = (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    return LogprobsMode.PROCESSED if unrestricted else mode


def _is_biased(sent: Mapping[str, Any]) -> bool:
    """True if the sampled distribution is not the model's, or if nothing was sampled at all."""
    return bool(_first_set(sent, _NEUTRAL_PENALTIES) or _first_set(sent, _NEUTRAL_SELECTION)) or any(
        sent.get(name) for name in _BIASES
    )


def _first_set(sent: Mapping[str, Any], neutral: Mapping[str, Any]) -> str:
    """The name of the first parameter that differs from its neutral value, "" if none does."""
    return next((name for name, value in neutral.items() if sent.get(name) not in (None, value)), "")
