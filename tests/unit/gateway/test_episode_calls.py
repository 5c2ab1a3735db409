"""The calls of a program that plays an episode: session, sampling, policy, and what its key does not allow."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.records import EPISODE_TURN, RecordedBy, Sampling, Status
from tentalis.gateway.calls.episode_turns import EpisodeTurns
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Scope, create
from tentalis.gateway.recording import recorder
from tentalis.inference.episode_key import EpisodeGrant, signed_key
from tests.support.gateway_lab import Lab, Script, lab

SECRET = b"a secret of sixteen and more"


def key(**claims: Any) -> str:
    given: dict[str, Any] = {
        "session_id": "episode/t/0/1-a",
        "task_id": "t",
        "policy": "assistant",
        "environment": "pong",
        "worker_id": "w7",
        "user_id": "ada",
        "sampling": Sampling(temperature=0.7, max_tokens=50),
        "expires": time.time() + 60,
    }
    return signed_key(EpisodeGrant.model_validate(given | claims), SECRET)


def bearer(**claims: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {key(**claims)}"}


def asked(gateway: Lab, headers: dict[str, str], **body: Any) -> httpx.Response:
    return gateway.chat("Hello", headers=headers, **body)


def test_every_call_belongs_to_the_session_of_its_key_and_is_recorded(tmp_path: Path) -> None:
    with lab(tmp_path, episode_secret=SECRET) as gateway:
        gateway.serve(1)
        own = {"X-Session-Id": "mine", "X-Turn-Type": "side", "X-User-Id": "eve", "X-Tentalis-Record": "off"}
        answer = asked(gateway, bearer() | own, model="gpt-4o")
        assert answer.status_code == 200, answer.text
        streamed = gateway.stream("Hello", headers=bearer(), model="claude")
        assert streamed[-1] is None
        assert "x-tentalis-task-id" not in answer.headers and answer.headers["x-session-id"] == "episode/t/0/1-a"
        assert {(each.session_id, each.turn_type, each.user_id, each.worker_id) for each in gateway.log.events} == {
            ("episode/t/0/1-a", EPISODE_TURN, "ada", "w7")
        }
        assert [(each.model, each.policy) for each in gateway.log.events] == [("assistant@v1", "assistant")] * 2
        assert all(each.response_token_ids for each in gateway.log.events)
        assert all(each.recorded_by is RecordedBy.GATEWAY for each in gateway.log.events)


def test_the_task_chooses_the_sampling_and_the_program_may_only_ask_for_fewer_tokens(tmp_path: Path) -> None:
    with lab(tmp_path, episode_secret=SECRET) as gateway:
        gateway.serve(1)
        bent = {
            "temperature": 0,
            "top_p": 0.1,
            "seed": 3,
            "frequency_penalty": 1,
            "logit_bias": {"1": 2},
            "stop": ["x"],
        }
        assert asked(gateway, bearer(), max_tokens=9, **bent).status_code == 200
        assert asked(gateway, bearer(), max_completion_tokens=900).status_code == 200
        first, second = gateway.script.bodies
        assert (first["temperature"], first["top_p"], first["top_k"], first["max_tokens"]) == (0.7, 1.0, 0, 9)
        assert not {"seed", "logit_bias", "frequency_penalty"} & first.keys() and first["stop"] == ["x"]
        assert second["max_tokens"] == 50 and "max_completion_tokens" not in second


@pytest.mark.parametrize(
    "headers, status, says",
    [
        ({"expires": 1.0}, 401, "has expired"),
        ({"policy": "stranger"}, 404, "no policy stranger"),
    ],
)
def test_a_key_that_does_not_fit_is_refused(tmp_path: Path, headers: dict[str, Any], status: int, says: str) -> None:
    with lab(tmp_path, episode_secret=SECRET) as gateway:
        gateway.serve(1)
        answer = asked(gateway, bearer(**headers))
        assert (answer.status_code, gateway.log.events) == (status, []) and says in answer.text
        checked = gateway.http.get("/v1/episode", headers=bearer(**headers))
        assert checked.status_code == status and says in checked.text


def test_a_key_of_another_secret_is_refused_also_where_no_key_is_required(tmp_path: Path) -> None:
    with lab(tmp_path, episode_secret=b"another secret of sixteen") as gateway:
        gateway.serve(1)
        assert asked(gateway, {"x-api-key": key()}).status_code == 401
        assert asked(gateway, {}).status_code == 200, "a caller without a key is a program of this machine"
    with lab(tmp_path / "without") as gateway:
        gateway.serve(1)
        answer = asked(gateway, bearer())
        assert answer.status_code == 401 and "plays no" not in answer.text and gateway.log.events == []


def test_the_key_allows_calls_of_models_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    admin = create(keys, [Scope.ADMIN])
    with lab(tmp_path, keys=keys, episode_secret=SECRET) as gateway:
        gateway.serve(1)
        assert gateway.http.get("/metrics", headers=bearer()).status_code == 403
        assert gateway.http.post("/v1/sessions/episode/end", headers=bearer()).status_code == 403
        assert gateway.http.get("/v1/usage", headers=bearer(user_id=None)).status_code == 403
        assert asked(gateway, bearer()).status_code == 200
        checked = gateway.http.get("/v1/episode", headers=bearer())
        assert checked.json() == {"session_id": "episode/t/0/1-a", "policy": "assistant", "model": "assistant@v1"}
        other = gateway.http.get("/v1/episode", headers={"Authorization": f"Bearer {admin}"})
        assert other.status_code == 403 and "key of an episode" in other.text


def test_a_call_waits_for_the_version_with_which_the_worker_began(tmp_path: Path) -> None:
    with lab(tmp_path, episode_secret=SECRET, hold_s=0.3) as gateway:
        unserved = asked(gateway, bearer())
        assert unserved.status_code == 503 and "not served" in unserved.text, "never the base model"
        gateway.serve(1)
        assert asked(gateway, bearer(least_version=2)).status_code == 503
        gateway.serve(2)
        assert asked(gateway, bearer(least_version=2)).status_code == 200
        assert [each.model for each in gateway.log.events] == ["assistant@v2"]


def test_the_calls_of_an_episode_are_bounded(tmp_path: Path) -> None:
    with lab(tmp_path, episode_secret=SECRET) as gateway:
        assert asked(gateway, bearer(max_turns=2)).status_code == 503, "not served: no turn"
        gateway.serve(1)
        assert [asked(gateway, bearer(max_turns=2)).status_code for _ in range(3)] == [200, 200, 403]
        refused = asked(gateway, bearer(max_turns=2), stream=True)
        assert refused.status_code == 403 and "the 2 turns of this episode are used up" in refused.text
        assert asked(gateway, bearer(max_turns=2, session_id="episode/t/0/2-b")).status_code == 200, "the next attempt"
        assert asked(gateway, bearer()).status_code == 200, "a key of an earlier version has no bound"
        assert len(gateway.log.events) == 4 and {each.status for each in gateway.log.events} == {Status.OK}


def test_the_counts_of_expired_keys_are_forgotten() -> None:
    clock = [1000.0]
    turns = EpisodeTurns(lambda: clock[0])
    grant = EpisodeGrant(
        session_id="s",
        task_id="t",
        policy="p",
        environment="e",
        worker_id="w",
        sampling=Sampling(),
        max_turns=1,
        expires=1100.0,
    )
    turns.take(grant)
    clock[0] = 1215.0
    with pytest.raises(APIError, match="used up"):
        turns.take(grant)
    clock[0] = 1300.0
    turns.take(grant)


def test_a_turn_that_the_log_does_not_take_is_refused_and_never_goes_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "EPISODE_ACK_S", 0.2)
    with lab(tmp_path, episode_secret=SECRET) as gateway:
        gateway.serve(1)
        gateway.log.away = True
        assert asked(gateway, bearer()).status_code == 503
        assert gateway.deps.recorder.spooled == 0
        gateway.log.back()
        assert [each.status for each in gateway.log.events] == [Status.OK, Status.FAILED]
        assert len({each.session_event_id for each in gateway.log.events}) == 1, "the worker takes it as failed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_call_is_on_the_log_before_the_program_hears_of_it(tmp_path: Path, stream: bool) -> None:
    failing = Script(error=(500, b'{"error": {"message": "broken"}}', "application/json"))
    with lab(tmp_path, failing, episode_secret=SECRET) as gateway:
        failing.adapters.add("assistant@v1")
        gateway.serve(1)
        assert asked(gateway, bearer(), stream=stream).status_code == 500
        assert [(each.turn_type, each.status) for each in gateway.log.events] == [(EPISODE_TURN, Status.FAILED)]
