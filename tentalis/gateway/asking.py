"""What is asked of a backend beyond what the client asked: tokens, and a distribution that is known. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.records import LogprobsMode, Sampling
from tentalis.gateway.capture import Capture, Wants
from tentalis.gateway.failure import Refused
from tentalis.gateway.messages import unseen
from tentalis.gateway.routing import Route
from tentalis.gateway.sessions_of import BODY_FIELDS

# Left out of a body, a server may put its model's own generation defaults here.
_BARE: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_PENALTIES: dict[str, float] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
}
_BENT = ("logit_bias", "bad_words", "allowed_token_ids")
# What picks one of several answers: what comes is no sample of the model's distribution.
_PICKED: dict[str, Any] = {"use_beam_search": False, "best_of": 1}
# A backend's words for an answer that it has not brought to its end itself (vLLM, SGLang).
_GIVEN_UP = ("abort", "error")
UNSEEN = "a message holds images, sounds or files, which its tokens do not say"
_GRAMMARS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
# Nobody said how long the answer may be.
_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A body for a backend, and what the client itself wants of the answer. `n`: choices that it will have."""

    body: dict[str, Any]
    wants: Wants
    n: int
    stream: bool


def asked(body: Mapping[str, Any], to: Route, *, chat: bool, tokens: bool) -> Asked:
    """The body to send. `tokens`: ask for token ids and log-probs, and pin what the distribution is; for the calls to
    backends that can give them. Raises Refused (400)."""
    sent = {name: value for name, value in body.items() if name not in BODY_FIELDS}
    n = sent.get("n")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise Refused(400, "n must be a whole number of at least 1")
    prompts = 1 if chat else _prompts(sent.get("prompt"))
    stream = sent.get("stream")
    if not (stream is None or isinstance(stream, bool)):
        raise Refused(400, "stream must be true or false")
    options = sent.get("stream_options")
    if not (options is None or isinstance(options, dict)):
        raise Refused(400, "stream_options must be an object")
    wants = Wants(
        logprobs=bool(sent.get("logprobs")) if chat else sent.get("logprobs") is not None,
        token_ids=bool(sent.get("return_token_ids")),
        usage=bool((options or {}).get("include_usage")),
    )
    if to.model is not None:
        sent["model"] = to.model
    if to.sampling is not None:
        for name in (*_PENALTIES, *_BENT, *_PICKED, "top_k"):
            sent.pop(name, None)
        sent |= {"temperature": to.sampling.temperature, "top_p": 1.0}
    if tokens:
        if to.policy:
            sent = _BARE | {name: value for name, value in sent.items() if value is not None}
        sent["return_token_ids"] = True
        if not wants.logprobs:
            sent["logprobs"] = True if chat else 0
    return Asked(sent, wants, (n or 1) * prompts, bool(stream))


def _prompts(prompt: Any) -> int:
    """How many prompts a plain completion has: a list of texts, or of lists of token ids, is several."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return len(prompt) if several else 1


def refuses_tokens(status: int, text: str) -> bool:
    """Whether an error says that a server does not know what only we have asked for."""
    named = ("return_token_ids", "logprobs", "top_k", "min_p", "repetition_penalty")
    return status in (400, 422) and any(name in text for name in named)


def sampling_of(sent: Mapping[str, Any]) -> Sampling | None:
    """The sampling that a body asks for; None where its numbers are none that can be recorded."""
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
    """Whether a grammar or a forced tool decides among the tokens."""
    shape = sent.get("response_format")
    forced = sent.get("tool_choice") not in (None, "none", "auto")
    plain = shape is None or (isinstance(shape, dict) and shape.get("type") == "text")
    return forced or not plain or any(sent.get(name) for name in _GRAMMARS)


def not_trainable(sent: Mapping[str, Any], to: Route, capture: Capture, *, tokens: bool, n: int) -> str:
    """Why a turn cannot be trained on, in words for a person; "" if it can."""
    if reason := not_trainable_as_asked(sent, to, tokens=tokens, n=n):
        return reason
    if not capture.has_token_ids:
        return _no_ids(to)
    if capture.tokens() is None:
        return f"the backend {to.backend.name} gave token ids and log-probs that do not fit together"
    if capture.finish_reason in _GIVEN_UP:
        return f"the answer is a part of one: the backend {to.backend.name} gave it up ({capture.finish_reason})"
    return ""


def _no_ids(to: Route) -> str:
    return f"the backend {to.backend.name} gives no token ids"


def not_trainable_as_asked(sent: Mapping[str, Any], to: Route, *, tokens: bool, n: int) -> str:
    """Why no answer to a call can be trained on, whatever it is; "" where that is for the answer to say."""
    if not to.policy:
        return "no policy was asked for: a plain model answered"
    if to.unserved:
        return f"no version of {to.policy} is served yet: the base model answered"
    if not tokens:
        return _no_ids(to)
    if unseen(sent.get("messages") or ()):
        return UNSEEN
    if sent.get("echo"):
        return "the answer repeats the prompt (echo)"
    if n != 1:
        return f"{n} answers were asked for: which of them the client used is not known"
    if picked := _in_force(sent, _PICKED):
        return f"the answer is the best of several and was not sampled ({picked})"
    sampling = sampling_of(sent)
    if sampling is None:
        return "the sampling parameters cannot be recorded"
    if sampling.temperature == 0:
        return "sampled greedily (temperature 0)"
    if sampling.top_p < 1 or sampling.top_k > 0:
        return "truncated sampling (top_p or top_k)"
    if sampling.constrained:
        return "a grammar or a forced tool constrained the sampling"
    if _bent(sent):
        return "penalties or biases bent the distribution"
    if logprobs_mode(sent, to) is not LogprobsMode.PROCESSED:
        return (
            f"the backend {to.backend.name} gives log-probs of the bare model (logprobs_mode: raw), "
            f"which at temperature {sampling.temperature:g} are not those of the sampling"
        )
    return ""


def logprobs_mode(sent: Mapping[str, Any], to: Route) -> LogprobsMode:
    """Of which distribution the backend's log-probs are. At temperature 1, with nothing cut off or bent, the bare
    model's and the one that was sampled from are the same."""
    mode, sampling = to.backend.logprobs_mode, sampling_of(sent)
    if mode is not LogprobsMode.RAW or sampling is None or sampling.constrained or _bent(sent):
        return mode
    bare = (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    return LogprobsMode.PROCESSED if bare else mode


def _bent(sent: Mapping[str, Any]) -> bool:
    """Whether what was sampled from is another distribution than the model's, or nothing was sampled at all."""
    return bool(_in_force(sent, _PENALTIES) or _in_force(sent, _PICKED)) or any(sent.get(name) for name in _BENT)


def _in_force(sent: Mapping[str, Any], unused: Mapping[str, Any]) -> str:
    """The first of these that has another value than its unused one, "" if none has."""
    return next((name for name, value in unused.items() if sent.get(name) not in (None, value)), "")
