"""Numbers that could not be trained on do not enter: refused by the bridge, marked by the gateway, no verdict of a
scorer."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from schemas.bounds import MAX_STEP_SCORE
from schemas.records import LogprobsMode
from schemas.tensors import float32_bytes
from tentalis.gateway.api.bodies import ResultBody, SessionBody, TaskSamplingBody
from tentalis.gateway.calls.backend_request import untrainable_request_reason
from tentalis.gateway.calls.capture import AnswerCapture
from tentalis.rewards.verdict import BadVerdict, ScoredStep, Verdict, checked_verdict


@pytest.mark.parametrize("temperature", [1e-39, 5e-324, 0.0499, 100.1, -0.1, float("nan"), float("inf")])
def test_the_bridge_refuses_a_temperature_that_cannot_be_trained_at(temperature: float) -> None:
    with pytest.raises(ValidationError):
        TaskSamplingBody(temperature=temperature)


def test_greedy_sampling_is_taken_and_not_trained_on() -> None:
    assert [TaskSamplingBody(temperature=t).temperature for t in (0.0, 0.05, 100.0)] == [0.0, 0.05, 100.0]


@pytest.mark.parametrize("logprob", [-1.1e4, -3e38, 0.5, float("nan"), float("-inf")])
def test_the_bridge_refuses_a_log_prob_out_of_bounds(logprob: float) -> None:
    bodies: list[tuple[type[BaseModel], dict[str, Any]]] = [
        (SessionBody, {"session_id": "s", "token_logprobs": [logprob]}),
        (
            ResultBody,
            {"task_id": "t", "worker_id": "w", "result": "", "response_tokens": [{"id": 1, "logprob": logprob}]},
        ),
    ]
    for body, fields in bodies:
        with pytest.raises(ValidationError):
            body(**fields)


@pytest.mark.parametrize(("logprob", "kept"), [(-9999.0, True), (0.0, True), (-3e38, False), (7.0, False)])
def test_a_backend_with_log_probs_out_of_bounds_gives_no_tokens_to_train_on(logprob: float, kept: bool) -> None:
    capture = AnswerCapture()
    choice = {"token_ids": [5], "logprobs": {"content": [{"logprob": logprob}]}, "prompt_token_ids": [1]}
    capture.add({"choices": [choice]})
    encoded = capture.encoded_tokens()
    assert (encoded is not None) == kept
    if encoded is not None:
        assert encoded[2] == float32_bytes([logprob])


@pytest.mark.parametrize(("temperature", "marked"), [(1e-39, True), (0.0499, True), (100.1, True), (0.05, False)])
def test_the_gateway_marks_a_turn_at_a_temperature_out_of_bounds(temperature: float, marked: bool) -> None:
    backend = SimpleNamespace(name="own")
    served: Any = SimpleNamespace(policy="p", substitute=False, unserved=False, backend=backend)
    reason = untrainable_request_reason(
        {"temperature": temperature}, served, tokens=True, n=1, mode=LogprobsMode.PROCESSED
    )
    assert ("is not from 0.05 to 100" in reason) == marked


@pytest.mark.parametrize("score", [3e38, -MAX_STEP_SCORE - 1e-9, float("nan"), float("inf")])
def test_a_step_score_out_of_bounds_is_no_verdict(score: float) -> None:
    assert checked_verdict(Verdict(1.0, {}, steps=(ScoredStep(0, 2, MAX_STEP_SCORE),))).steps
    with pytest.raises(BadVerdict, match="from -100 to 100"):
        checked_verdict(Verdict(1.0, {}, steps=(ScoredStep(0, 2, score),)))
