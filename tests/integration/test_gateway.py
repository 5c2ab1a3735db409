"""The gateway over HTTP, before a scripted backend: the contract that clients and the log rely on."""

from pathlib import Path

import numpy as np

from schemas.records import LogprobsMode, Status
from schemas.tensors import float32_view, int32_view
from tests.integration.gateway_lab import PROMPT_IDS, lab


def test_a_whole_answer_is_passed_on_and_recorded(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(3)
        response = gateway.chat("Hello", headers={"X-Session-Id": "s1", "X-Turn-Type": "main"})
        assert response.status_code == 200
        answer = response.json()
        assert answer["choices"][0]["message"]["content"] == "Good day, friend!"
        assert "token_ids" not in answer["choices"][0] and "prompt_token_ids" not in answer
        assert answer["choices"][0]["logprobs"] is None
        [event] = gateway.log.events
    assert event.session_event_id == response.headers["x-request-id"]
    assert event.session_id == "s1" == response.headers["x-session-id"]
    assert (event.turn_type, event.decided_by, event.status) == ("main", "header", Status.OK)
    assert (event.policy, event.model, event.gateway_id) == ("assistant", "assistant@v3", "gw-1")
    assert [m.model_dump() for m in event.messages] == [{"role": "user", "content": "Hello"}]
    assert (event.response, event.finish_reason, event.not_trainable) == ("Good day, friend!", "stop", "")
    assert int32_view(event.prompt_token_ids).tolist() == PROMPT_IDS
    assert int32_view(event.response_token_ids).tolist() == [100, 101, 102, 103]
    np.testing.assert_allclose(float32_view(event.sampler_logprobs), -0.5)
    assert event.logprobs_mode is LogprobsMode.PROCESSED
    assert (event.sampling.temperature, event.sampling.top_p, event.sampling.top_k) == (1.0, 1.0, 0)
