"""Measures whether the log-probs of a server are those of the distribution that it samples from, as training requires.

Many servers return the log-probs of the bare model. At temperature 1 the two are equal; at any other temperature they
differ, and every importance ratio of the trainer would be wrong.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from schemas.records import LogprobsMode
from tentalis.inference.protocol import Float32, Inference, Int32, NotTokenExact, RequestRefused

log = logging.getLogger(__name__)

MENDING_FLAG = "--logprobs-mode processed_logprobs"
"""The flag with which vLLM gives the log-probs of the distribution that it samples from."""
_TEXT = "Once upon a time there was"
# Far from 1, and few tokens: then both kinds of log-probs differ clearly for any model.
_TEMPERATURE, _TOP = 2.0, 5
_SAMPLES, _TOKENS = 4, 8
PAUSES_S = (1.0, 2.0, 4.0)
"""Seconds before a measurement is made again in which the server failed."""
# Half-precision servers compute the same log-prob twice with about this difference.
_TOLERANCE = 0.05


class CheckedServer(Inference, Protocol):
    """The part of a client that the check needs."""

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Int32: ...


@dataclass(frozen=True, slots=True)
class LogprobsMeasurement:
    """The distribution of a server's log-probs, as measured; None, if it could not be. `reason`: the numbers, or the
    reason why there are none."""

    mode: LogprobsMode | None
    reason: str


async def measure_logprobs(server: CheckedServer, model: str) -> LogprobsMeasurement:
    """Samples a few tokens at temperature 2 among the 5 most likely, and compares their log-probs with what follows
    from the model's own.

    A refused request and an answer of another form say that nothing can be measured, and so does an error of the
    server's own that comes again after each pause. Raises ServerUnavailable.
    """
    for pause in PAUSES_S:
        try:
            return await _measured_once(server, model)
        except RequestRefused as error:
            log.warning("the log-probs of %s are not measured yet: %s; again in %g s", model, error, pause)
        await asyncio.sleep(pause)
    try:
        return await _measured_once(server, model)
    except RequestRefused as error:
        return LogprobsMeasurement(None, str(error))


async def _measured_once(server: CheckedServer, model: str) -> LogprobsMeasurement:
    """Raises ServerUnavailable, and RequestRefused for an internal error."""
    try:
        prompt = (await server.tokenize(model, _TEXT)).tolist()
        generation = await server.generate(
            model, prompt, n=_SAMPLES, temperature=_TEMPERATURE, top_k=_TOP, max_tokens=_TOKENS, seed=1
        )
        given, processed, raw = [], [], []
        for completion in generation.completions:
            if completion.token_ids is None or completion.logprobs is None:
                return LogprobsMeasurement(None, "it gives no token ids or no log-probs")
            tokens = [*prompt, *completion.token_ids.tolist()]
            own, _, top = await server.score_top(model, tokens, 1.0, _TOP)
            given.append(completion.logprobs)
            processed.append(_restricted(own[len(prompt) :], top[len(prompt) :]))
            raw.append(own[len(prompt) :])
    except RequestRefused as error:
        if error.status >= 500 and not isinstance(error, NotTokenExact):
            raise
        return LogprobsMeasurement(None, str(error))
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        return LogprobsMeasurement(None, f"its answers have another form ({error!r})")
    return judge_logprobs(np.concatenate(given), np.concatenate(processed), np.concatenate(raw))


def _restricted(own: Float32, top: Float32) -> Float32:
    """Log-probs at _TEMPERATURE among the likeliest tokens, of the model's own log-probs [n] and [n, _TOP]."""
    scaled = top.astype(np.float64) / _TEMPERATURE
    return np.asarray(own / _TEMPERATURE - np.logaddexp.reduce(scaled, axis=-1), dtype=np.float32)


def judge_logprobs(given: Float32, processed: Float32, raw: Float32) -> LogprobsMeasurement:
    """Decides whether the log-probs [n] that a server gave match the expected `processed` or the expected `raw`
    ones. Compares medians, because in half precision a token at the edge of the top-k may be inside or outside of
    it."""
    if not len(given):
        return LogprobsMeasurement(None, "it sampled no token")
    differences = {
        LogprobsMode.PROCESSED: float(np.median(np.abs(given - processed))),
        LogprobsMode.RAW: float(np.median(np.abs(given - raw))),
    }
    numbers = ", ".join(f"{difference:.2g} from the {mode.value} ones" for mode, difference in differences.items())
    met = [mode for mode, difference in differences.items() if difference <= _TOLERANCE]
    if len(met) > 1:
        return LogprobsMeasurement(None, f"its samples do not tell the kinds apart: {numbers}")
    return LogprobsMeasurement(met[0] if met else LogprobsMode.UNKNOWN, f"its log-probs differ by {numbers}")


def settled(declared: LogprobsMode, measured: LogprobsMeasurement) -> tuple[LogprobsMode, str]:
    """Returns the mode to record with results, and a message for the operator ("" if the server is fit for
    training). A measured mode takes precedence; the declared one is used only if the server cannot be measured."""
    match measured.mode:
        case None:
            return (
                declared,
                f"is declared to give {declared.value} log-probs, which cannot be checked: {measured.reason}",
            )
        case LogprobsMode.PROCESSED:
            return LogprobsMode.PROCESSED, ""
        case LogprobsMode.RAW:
            said = "is declared to give processed log-probs, but " if declared is LogprobsMode.PROCESSED else ""
            return LogprobsMode.RAW, (
                f"{said}gives the log-probs of the bare model, not of the distribution that it samples from "
                f"({measured.reason}): its answers are trained on only at temperature 1. Start vLLM with {MENDING_FLAG}"
            )
        case _:
            return LogprobsMode.UNKNOWN, (
                f"gives log-probs of neither the bare model nor the distribution that it samples from "
                f"({measured.reason}): its answers are scored, but not trained on. Start vLLM with {MENDING_FLAG}"
            )
