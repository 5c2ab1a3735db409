"""The teacher: log-probs of the student's own tokens under the prompt with the hint."""

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from schemas.records import Sample, Task
from schemas.tensors import Float32Array, Int32Array, float32_bytes, int32_bytes, int32_view, uint8_view
from tentalis.inference.protocol import Inference, NotTokenExact, RequestRefused, UnknownModel
from tentalis.opd.models import TeacherModel, TeacherRefused
from tentalis.opd.prompt import NoPrompt, NoUserMessage, Prompt, dated, hinted, students

log = logging.getLogger(__name__)

T = TypeVar("T")

NO_PROMPT, OTHER_PROMPT, NO_USER = "no_prompt", "other_prompt", "no_user_message"
NO_HINT, REFUSED, NO_RESPONSE, NO_SCORES = "no_hint", "refused", "no_response", "no_scores"
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

    async def logprobs(self, sample: Sample, task: Task, hints: Sequence[str]) -> Taught:
        """The natural log-prob of each token that the policy chose, under the first hint, at the temperature at which
        the student sampled it, 0 outside the loss mask; and, if asked for, the likeliest tokens there under each hint.
        A hint with which the call is refused is left out if there is another.

        Raises:
            TeacherRefused: the task's prompt is not the one that the student had, or takes no hint, the server refuses
                the call as such (too long), or what it returns is not one finite number per token.
            InferenceError: anything else, among them ServerUnavailable and UnknownModel.
        """
        try:
            prompt = students(task)
        except NoPrompt as cause:
            raise TeacherRefused(NO_PROMPT, str(cause)) from cause
        name = await self._model.name(sample)
        prompt = await self._same(sample, name, prompt, task.event_time)
        taught: list[Taught] = []
        refusals: list[TeacherRefused] = []
        for hint in hints:
            try:
                taught.append(await self._under(sample, name, prompt, hint))
            except TeacherRefused as refusal:
                refusals.append(refusal)
            if taught and not self.top:
                break  # only one hint can give the log-probs of the tokens themselves
        if not taught:
            raise refusals[0] if refusals else TeacherRefused(NO_HINT, "there is no hint")
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

    async def _same(self, sample: Sample, name: str, prompt: Prompt, at: int) -> Prompt:
        """The student's prompt, which can be made again token by token: else the hinted one would differ from it in
        more than the hint, and so would what the teacher says. If today it is another, perhaps it was not on the day of
        the task, `at` (ms)."""
        had = int32_view(sample.token_ids)[: _response_start(sample)]
        for each in filter(None, (prompt, dated(prompt, at))):
            again = await self._asked(name, self._inference.render(name, each.messages, template=each.template))
            if np.array_equal(had, again):
                return each
        raise TeacherRefused(
            OTHER_PROMPT,
            f"its prompt of {len(had)} tokens becomes {len(again)} other tokens when it is made again without a "
            "hint: the request is not recorded as it was sent, or the chat template is another",
        )

    async def _under(self, sample: Sample, name: str, student: Prompt, hint: str) -> Taught:
        try:
            prompt = hinted(student, hint)
        except NoUserMessage as cause:
            raise TeacherRefused(NO_USER, str(cause)) from cause
        tokens, start = int32_view(sample.token_ids), _response_start(sample)
        prefix = await self._asked(name, self._inference.render(name, prompt.messages, template=prompt.template))
        ids, temperature = np.concatenate([prefix, tokens[start:]]).tolist(), sample.sampling.temperature
        if not self.top:
            scores = await self._asked(name, self._inference.score(name, ids, temperature=temperature))
            return Taught(name, (hint,), aligned(sample, prefix, scores))
        scores, top_ids, top_logprobs = await self._asked(
            name, self._inference.score_top(name, ids, temperature=temperature, k=self.top)
        )
        own = aligned(sample, prefix, scores)
        mask = uint8_view(sample.loss_mask) == 1
        listed = np.full((len(mask), self.top), -1, dtype=np.int32)
        listed_logprobs = np.zeros((len(mask), self.top), dtype=np.float32)
        listed[start:], listed_logprobs[start:] = top_ids[len(prefix) :], top_logprobs[len(prefix) :]
        listed[~mask], listed_logprobs[~mask] = -1, 0.0
        return Taught(name, (hint,), own, self.top, int32_bytes(listed), float32_bytes(listed_logprobs))

    async def _asked(self, name: str, answer: Awaitable[T]) -> T:
        """An answer of the server's about one record. Raises TeacherRefused for a refusal of what is in it."""
        try:
            return await answer
        except UnknownModel:
            await self._model.unknown(name)
            raise
        except NotTokenExact as cause:
            raise TeacherRefused(NO_SCORES, str(cause)) from cause
        except RequestRefused as cause:
            if cause.status in _ABOUT_THE_RECORD:
                raise TeacherRefused(REFUSED, str(cause)) from cause
            raise


def _response_start(sample: Sample) -> int:
    chosen = np.flatnonzero(uint8_view(sample.loss_mask))
    if not len(chosen):
        raise TeacherRefused(NO_RESPONSE, "the sample has no response tokens")
    return int(chosen[0])


def aligned(sample: Sample, prefix: Int32Array, scores: Float32Array) -> bytes:
    """Puts the scores of `prefix` + response, float32[len(prefix) + r], to the sample's n tokens: float32[n] as bytes.

    Raises TeacherRefused if there is not exactly one finite score for each token of the response.
    """
    mask, start = uint8_view(sample.loss_mask), _response_start(sample)
    response = np.asarray(scores[len(prefix) :], dtype=np.float32)
    if len(scores) != len(prefix) + len(mask) - start or not len(prefix):
        raise TeacherRefused(
            NO_SCORES, f"{len(scores)} scores for {len(prefix)} prompt tokens and {len(mask) - start} response tokens"
        )
    placed = np.zeros(len(mask), dtype=np.float32)
    placed[start:] = np.where(mask[start:] == 1, response, np.float32(0))
    if not np.isfinite(placed).all():
        raise TeacherRefused(NO_SCORES, f"{int((~np.isfinite(placed)).sum())} of {len(response)} scores are not finite")
    return float32_bytes(placed)
