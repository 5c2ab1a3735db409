"""A gateway tells if a turn can be trained on, and which task a turn became."""

from pathlib import Path
from typing import Any

import pytest

from schemas.ids import turn_task_id
from schemas.records import LogprobsMode
from tests.support.gateway_lab import Script, lab

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def test_a_backend_without_token_ids_is_recorded_as_not_trainable(tmp_path: Path) -> None:
    for number, script in enumerate((Script(token_ids=False), Script(token_ids=False, refuses="return_token_ids"))):
        with lab(tmp_path / str(number), script) as gateway:
            gateway.serve(1)
            assert gateway.chat("x").status_code == 200
            assert gateway.stream("x")[-1] is None
            assert all("no token ids" in event.not_trainable for event in gateway.log.events)
            assert all(event.response == "Good day, friend!" for event in gateway.log.events)
            # Who refuses is asked once.
            refused = [b for b in script.bodies if "return_token_ids" in b]
            assert len(refused) == (1 if script.refuses else 2)


def test_a_bad_call_of_one_client_does_not_switch_off_token_ids(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        gateway.script.error = (400, b'{"error": {"message": "top_logprobs must be at most 20"}}', "application/json")
        assert gateway.chat("x", logprobs=True, top_logprobs=99).status_code == 400
        gateway.script.error = None
        gateway.chat("x")
        assert gateway.log.events[-1].not_trainable == ""


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"temperature": 0.7}, "logprobs_mode: raw"),
        ({"temperature": 0}, "greedily"),
        ({"top_p": 0.9}, "truncated"),
        ({"n": 2}, "2 answers"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"presence_penalty": 1.5}, "penalties"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 3}, "best_of"),
        ({"model": "base"}, "no policy"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "images"),
    ],
)
def test_what_cannot_be_trained_on_says_why(tmp_path: Path, more: dict[str, Any], reason: str) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        answer = gateway.chat("x", **more)
        [event] = gateway.log.events
        assert reason in event.not_trainable
        assert gateway.metric("tentalis_gateway_trainable_total", trainable="no") == 1
        # There will be no task that feedback could name.
        assert answer.status_code == 200 and "x-tentalis-task-id" not in answer.headers
        if "n" not in more:
            with gateway.streaming("x", **more) as response:
                response.read()
                assert response.status_code == 200 and "x-tentalis-task-id" not in response.headers


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_the_backend_gave_up_is_passed_on_and_not_trained_on(tmp_path: Path, streamed: bool) -> None:
    with lab(tmp_path, Script(finish_reason="abort")) as gateway:
        gateway.serve(1)
        assert gateway.chat("x", stream=streamed).status_code == 200
        gateway.script.finish_reason = "length"
        assert gateway.chat("x", stream=streamed).status_code == 200
        assert ["gave it up" in event.not_trainable for event in gateway.log.events] == [True, False]


def test_a_completion_that_repeats_its_prompt_is_not_trainable(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        gateway.serve(1)
        body = {"model": "assistant", "prompt": "Once", "echo": True}
        assert gateway.http.post("/v1/completions", json=body).status_code == 200
        assert gateway.http.post("/v1/completions", json=body | {"echo": False}).status_code == 200
        assert ["echo" in event.not_trainable for event in gateway.log.events] == [True, False]


def test_the_task_of_a_turn_is_named_where_there_will_be_one(tmp_path: Path) -> None:
    for number, script in enumerate((Script(), Script(token_ids=False), Script(words=("one",)))):
        with lab(tmp_path / str(number), script) as gateway:
            gateway.serve(1)
            told = []
            for stream in (False, True):
                with gateway.streaming("x", headers={"X-Session-Id": "s"}, stream=stream) as response:
                    response.read()
                    told.append(response.headers.get("x-tentalis-task-id"))
            events = gateway.log.events
            tasks = [None if e.not_trainable else turn_task_id(e.session_id, e.session_event_id) for e in events]
            assert told == tasks and (None in told) is not script.token_ids


@pytest.mark.parametrize(
    ("mode", "more", "recorded", "trainable"),
    [
        ("raw", {}, LogprobsMode.PROCESSED, True),
        ("raw", {"temperature": 1, "top_p": 1}, LogprobsMode.PROCESSED, True),
        ("raw", {"temperature": 0.7}, LogprobsMode.RAW, False),
        ("raw", {"top_k": 5}, LogprobsMode.RAW, False),
        ("raw", {"repetition_penalty": 1.1}, LogprobsMode.RAW, False),
        ("processed", {"temperature": 0.7}, LogprobsMode.PROCESSED, True),
    ],
)
def test_log_probs_of_the_bare_model_are_those_of_the_sampling_at_temperature_1(
    tmp_path: Path, mode: str, more: dict[str, Any], recorded: LogprobsMode, trainable: bool
) -> None:
    with lab(tmp_path, logprobs_mode=LogprobsMode(mode)) as gateway:
        gateway.serve(1)
        assert gateway.chat("x", **more).status_code == 200
        [event] = gateway.log.events
        assert (event.logprobs_mode, event.not_trainable == "") == (recorded, trainable)


def test_vllms_log_probs_are_taken_for_what_it_gives_unless_told_otherwise(tmp_path: Path) -> None:
    with lab(tmp_path) as gateway:
        assert gateway.deps.settings.backends[0].logprobs_mode is LogprobsMode.RAW


def test_a_policy_may_force_a_distribution_that_can_be_trained_on(tmp_path: Path) -> None:
    policy = {"name": "assistant", "backend": "local", "models": ["*"], "sampling": {"temperature": 0.8}}
    with lab(tmp_path, policies=[policy], logprobs_mode=LogprobsMode.PROCESSED) as gateway:
        gateway.serve(1)
        gateway.chat("x", temperature=0, top_p=0.5, top_k=4, presence_penalty=1)
        [body], [event] = gateway.script.bodies, gateway.log.events
        assert (body["temperature"], body["top_p"], body["top_k"]) == (0.8, 1.0, 0)
        assert "presence_penalty" not in body
        assert (event.sampling.temperature, event.not_trainable) == (0.8, "")
