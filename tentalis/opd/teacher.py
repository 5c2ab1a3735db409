"""The teacher: log-probs of the student's own tokens under the prompt with the hint."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schemas.records import Message, Sample
from schemas.tensors import Float32Array, Int32Array, float32_bytes, int32_bytes, int32_view, uint8_view
from tentalis.inference.protocol import Inference, RequestRefused, UnknownModel
from tentalis.opd.models import TeacherModel, TeacherRefused
from tentalis.opd.prompt import NoUserMessage, hinted

log = logging.getLogger(__name__)

# Statuses with which a server refuses a call for what is in it: the same record would be refused again.
_ABOUT_THE_RECORD = frozenset({400, 413, 422})


@dataclass(frozen=True, slots=True)
class Taught:
    """What a teacher says of the n tokens of a sample, under the hints that it could be given. `logprobs` float32[n] as
    bytes, under the first hint; with k likeliest tokens at each, `topk_ids` int32[hints, n, k] and `topk_logprobs`
    float32[hints, n, k] as bytes, -1 and 0 outside the loss mask."""

    teacher: str
    hints: tuple[str, ...]
    logprobs: bytes
    topk: int = 0
    topk_ids: bytes = b""
    topk_logprobs: bytes = b""


class Teacher:
    """Scores samples with one model of an inference server.

    Args:
        inference: the server.
        model: names the model.
        top: how many likeliest tokens are asked for at each token.
    """

    def __init__(self, inference: Inference, model: TeacherModel, top: int = 0) -> None:
        self._inference = inference
        self._model = model
        self.top = top

    async def logprobs(self, sample: Sample, messages: Sequence[Message], hints: Sequence[str]) -> Taught:
        """The natural log-prob of each token that the policy chose, under the first hint, at the temperature at which
        the student sampled it, 0 outside the loss mask; and, if asked for, the likeliest tokens there under each hint.
        A hint with which the call is refused is left out if there is another.

        Raises:
            TeacherRefused: the prompt takes no hint, the server refuses the call as such (too long), or what it returns
                is not one finite number per token.
            InferenceError: anything else, among them ServerUnavailable and UnknownModel.
        """
        taught: list[Taught] = []
        refusals: list[TeacherRefused] = []
        for hint in hints:
            try:
                taught.append(await self._under(sample, messages, hint))
            except TeacherRefused as refusal:
                refusals.append(refusal)
            if taught and not self.top:
                break  # only one hint can give the log-probs of the tokens themselves
        if not taught:
            raise refusals[0] if refusals else TeacherRefused("there is no hint")
        for left_out in refusals:
            log.warning("one of %d hints for result %s is left out: %s", len(hints), sample.result_id, left_out)
        first = taught[0]
        return Taught(
            first.teacher,
            tuple(hint for each in taught for hint in each.hints),
            first.logprobs,
            self.top,
            b"".join(each.topk_ids for each in taught),
            b"".join(each.topk_logprobs for each in taught),
        )

    async def _under(self, sample: Sample, messages: Sequence[Message], hint: str) -> Taught:
        try:
            prompt = hinted(messages, hint)
        except NoUserMessage as cause:
            raise TeacherRefused(str(cause)) from cause
        tokens, start = int32_view(sample.token_ids), _response_start(sample)
        name = await self._model.name(sample)
        try:
            prefix = await self._inference.render(name, prompt)
            ids, temperature = np.concatenate([prefix, tokens[start:]]).tolist(), sample.sampling.temperature
            if not self.top:
                scores = await self._inference.score(name, ids, temperature=temperature)
                return Taught(name, (hint,), aligned(sample, prefix, scores))
            scores, top_ids, top_logprobs = await self._inference.score_top(
                name, ids, temperature=temperature, k=self.top
            )
        except UnknownModel:
            await self._model.unknown(name)
            raise
        except RequestRefused as cause:
            if cause.status in _ABOUT_THE_RECORD:
                raise TeacherRefused(str(cause)) from cause
            raise
        own = aligned(sample, prefix, scores)
        mask = uint8_view(sample.loss_mask) == 1
        listed = np.full((len(mask), self.top), -1, dtype=np.int32)
        listed_logprobs = np.zeros((len(mask), self.top), dtype=np.float32)
        listed[start:], listed_logprobs[start:] = top_ids[len(prefix) :], top_logprobs[len(prefix) :]
        listed[~mask], listed_logprobs[~mask] = -1, 0.0
        return Taught(name, (hint,), own, self.top, int32_bytes(listed), float32_bytes(listed_logprobs))


def _response_start(sample: Sample) -> int:
    chosen = np.flatnonzero(uint8_view(sample.loss_mask))
    if not len(chosen):
        raise TeacherRefused("the sample has no response tokens")
    return int(chosen[0])


def aligned(sample: Sample, prefix: Int32Array, scores: Float32Array) -> bytes:
    """Puts the scores of `prefix` + response, float32[len(prefix) + r], to the sample's n tokens: float32[n] as bytes.

    Raises TeacherRefused if there is not exactly one finite score for each token of the response.
    """
    mask, start = uint8_view(sample.loss_mask), _response_start(sample)
    response = np.asarray(scores[len(prefix) :], dtype=np.float32)
    if len(scores) != len(prefix) + len(mask) - start or not len(prefix):
        raise TeacherRefused(
            f"{len(scores)} scores for {len(prefix)} prompt tokens and {len(mask) - start} response tokens"
        )
    placed = np.zeros(len(mask), dtype=np.float32)
    placed[start:] = np.where(mask[start:] == 1, response, np.float32(0))
    if not np.isfinite(placed).all():
        raise TeacherRefused(f"{int((~np.isfinite(placed)).sum())} of {len(response)} scores are not finite")
    return float32_bytes(placed)
