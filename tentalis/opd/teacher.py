"""The teacher: log-probs of the student's own tokens under the prompt with the hint."""

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from schemas.records import Sample, Task
from schemas.tensors import Float32Array, Int32Array, float32_bytes, int32_bytes, int32_view, uint8_view
from tentalis.inference.protocol import Inference, NotTokenExact, RequestRefused, UnknownModel
from tentalis.inference.replicas.router import ReplicaRouter
from tentalis.opd.models import TeacherModel, TeacherRefused
from tentalis.opd.prompt import NoPrompt, NoUserMessage, TeacherPrompt, student_prompt, with_date, with_hint

log = logging.getLogger(__name__)

T = TypeVar("T")

NO_PROMPT, OTHER_PROMPT, NO_USER = "no_prompt", "other_prompt", "no_user_message"
NO_HINT, REFUSED, NO_RESPONSE, NO_SCORES = "no_hint", "refused", "no_response", "no_scores"


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """A teacher's log-probs of the n tokens of a sample, under the hints that the call accepted. `logprobs` float32[n]
    as bytes, under the first hint; with the k most likely tokens at each, `topk_ids` int32[hints, n, k] and
    `topk_logprobs` float32[hints, n, k] as bytes, -1 and 0 outside the loss mask."""

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
        model: chooses the model.
        top: number of most likely tokens requested at each token.
        routers: of the replicas that `inference` asks.
    """

    def __init__(
        self, inference: Inference, model: TeacherModel, top: int = 0, routers: Sequence[ReplicaRouter] = ()
    ) -> None:
        self._inference = inference
        self._model = model
        self.top = top
        self.routers = routers

    async def logprobs(self, sample: Sample, task: Task, hints: Sequence[str]) -> TeacherScores:
        """The natural log-prob of each token that the policy chose, under the first hint, at the temperature at which
        the student sampled it, 0 outside the loss mask; with `top`, also the most likely tokens there under each hint.
        A hint for which the call is refused is left out if another one succeeds.

        Raises:
            TeacherRefused: the task's prompt is not the student's or takes no hint, the server refuses the content of
                the call (too long), or it does not return one finite number per token.
            InferenceError: any other failure, including ServerUnavailable and UnknownModel.
        """
        try:
            prompt = student_prompt(task)
        except NoPrompt as cause:
            raise TeacherRefused(NO_PROMPT, str(cause)) from cause
        name = await self._model.name(sample)
        prompt = await self._matching_prompt(sample, name, prompt, task.event_time)
        scored: list[TeacherScores] = []
        refusals: list[TeacherRefused] = []
        for hint in hints:
            try:
                scored.append(await self._scores_under_hint(sample, name, prompt, hint))
            except TeacherRefused as refusal:
                refusals.append(refusal)
            if scored and not self.top:
                break  # the log-probs of the given tokens come from one hint only
        if not scored:
            raise refusals[0] if refusals else TeacherRefused(NO_HINT, "there is no hint")
        for refused in refusals:
            log.warning("one of %d hints for result %s is left out: %s", len(hints), sample.result_id, refused)
        first = scored[0]
        return TeacherScores(
            first.teacher,
            tuple(hint for scores in scored for hint in scores.hints),
            first.logprobs,
            self.top,
            b"".join(scores.topk_ids for scores in scored),
            b"".join(scores.topk_logprobs for scores in scored),
        )

    async def _matching_prompt(
        self, sample: Sample, name: str, prompt: TeacherPrompt, event_time: int
    ) -> TeacherPrompt:
        """The student's prompt, after a check that it renders to the same tokens again: otherwise the hinted prompt and
        the teacher's log-probs would differ by more than the hint. If it renders differently today, the date of the
        task, `event_time` (ms), is tried."""
        original_ids = int32_view(sample.token_ids)[: _response_start(sample)]
        for candidate in filter(None, (prompt, with_date(prompt, event_time))):
            rendered_ids = await self._call(
                name, self._inference.render(name, candidate.messages, template=candidate.template)
            )
            if np.array_equal(original_ids, rendered_ids):
                return candidate
        raise TeacherRefused(
            OTHER_PROMPT,
            f"its prompt of {len(original_ids)} tokens renders as {len(rendered_ids)} other tokens, without a hint: "
            "the request was not recorded as sent, or the chat template has changed",
        )

    async def _scores_under_hint(self, sample: Sample, name: str, student: TeacherPrompt, hint: str) -> TeacherScores:
        try:
            prompt = with_hint(student, hint)
        except NoUserMessage as cause:
            raise TeacherRefused(NO_USER, str(cause)) from cause
        tokens, start = int32_view(sample.token_ids), _response_start(sample)
        prefix = await self._call(name, self._inference.render(name, prompt.messages, template=prompt.template))
        ids, temperature = np.concatenate([prefix, tokens[start:]]).tolist(), sample.sampling.temperature
        if not self.top:
            scores = await self._call(name, self._inference.score(name, ids, temperature=temperature))
            return TeacherScores(name, (hint,), align_scores(sample, prefix, scores))
        scores, top_ids, top_logprobs = await self._call(
            name, self._inference.score_top(name, ids, temperature=temperature, k=self.top)
        )
        own_logprobs = align_scores(sample, prefix, scores)
        mask = uint8_view(sample.loss_mask) == 1
        top_ids_by_token = np.full((len(mask), self.top), -1, dtype=np.int32)
        top_logprobs_by_token = np.zeros((len(mask), self.top), dtype=np.float32)
        top_ids_by_token[start:], top_logprobs_by_token[start:] = top_ids[len(prefix) :], top_logprobs[len(prefix) :]
        top_ids_by_token[~mask], top_logprobs_by_token[~mask] = -1, 0.0
        return TeacherScores(
            name, (hint,), own_logprobs, self.top, int32_bytes(top_ids_by_token), float32_bytes(top_logprobs_by_token)
        )

    async def _call(self, name: str, call: Awaitable[T]) -> T:
        """The server's answer about one record. Raises TeacherRefused if the server refuses the record's content."""
        try:
            return await call
        except UnknownModel:
            await self._model.on_unknown_model(name)
            raise
        except NotTokenExact as cause:
            raise TeacherRefused(NO_SCORES, str(cause)) from cause
        except RequestRefused as cause:
            if cause.by_content:
                raise TeacherRefused(REFUSED, str(cause)) from cause
            raise


def _response_start(sample: Sample) -> int:
    chosen = np.flatnonzero(uint8_view(sample.loss_mask))
    if not len(chosen):
        raise TeacherRefused(NO_RESPONSE, "the sample has no response tokens")
    return int(chosen[0])


def align_scores(sample: Sample, prefix: Int32Array, scores: Float32Array) -> bytes:
    """Aligns the scores of `prefix` + response, float32[len(prefix) + r], with the n tokens: float32[n] as bytes.

    Raises TeacherRefused if there is not exactly one finite score for each token of the response.
    """
    mask, start = uint8_view(sample.loss_mask), _response_start(sample)
    response = np.asarray(scores[len(prefix) :], dtype=np.float32)
    if len(scores) != len(prefix) + len(mask) - start or not len(prefix):
        raise TeacherRefused(
            NO_SCORES, f"{len(scores)} scores for {len(prefix)} prompt tokens and {len(mask) - start} response tokens"
        )
    aligned_scores = np.zeros(len(mask), dtype=np.float32)
    aligned_scores[start:] = np.where(mask[start:] == 1, response, np.float32(0))
    if not np.isfinite(aligned_scores).all():
        raise TeacherRefused(
            NO_SCORES, f"{int((~np.isfinite(aligned_scores)).sum())} of {len(response)} scores are not finite"
        )
    return float32_bytes(aligned_scores)
