"""One task in, its results out."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from schemas import topics
from schemas.records import (
    AssignmentScope,
    LogprobsMode,
    Opens,
    PolicyAck,
    PolicyUpdate,
    Promotion,
    RecordedBy,
    Result,
    Sampling,
    Source,
    Status,
    Terms,
    ToolCall,
)
from schemas.tensors import float32_view, int32_view
from schemas.wire.codec import Codec
from tentalis.agents.workers import policy_calls as policy_calls_module
from tentalis.agents.workers.answer import Answerer, failed_instead, seed_of, send_fitting, without_texts
from tentalis.agents.workers.places import Places
from tentalis.agents.workers.process import WorkerOptions, is_mine
from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import RequestRefused, ServerUnavailable, UnknownModel
from tentalis.kafka.producer import checked_size
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.candidates import ISSUED_FOR, Candidates, issue_metadata
from tentalis.policies.served import ServedVersions
from tentalis.rewards import registry
from tentalis.text.timestamps import now_ms
from tests.support.loop_records import T0, ack, assignment, assignment_ack, promotion, task, update
from tests.support.loop_server import LoopServer
from tests.support.worker_lab import policy_calls


def answerer(
    server: LoopServer | OpenAIClient,
    served: ServedVersions,
    patience: float = 5.0,
    assigned: AssignedVersions | None = None,
    candidates: Candidates | None = None,
    places: Places | None = None,
) -> Answerer:
    calls = policy_calls(served, assigned, candidates, patience_s=patience, places=places)
    return Answerer(server, calls, worker_id="w", server_id="local")


def served_at(version: int) -> ServedVersions:
    served = ServedVersions("local")
    served.apply(ack(version))
    return served


def within(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_results_record_what_was_sampled_and_by_whom() -> None:
    server = LoopServer(["assistant@v3"])
    of = task(n=3, sampling=Sampling(temperature=0.7, max_tokens=9, stop=("\n",)))
    results = within(answerer(server, served_at(3)).answer(of, T0 + 5))
    assert [r.sample_index for r in results] == [0, 1, 2]
    first = results[0]
    assert first.status is Status.OK and first.opened_at == T0 + 5
    assert int32_view(first.prompt_token_ids).tolist() == [1, 2, 3]
    assert int32_view(first.response_token_ids).tolist() == [10, 11, 2]
    assert float32_view(first.sampler_logprobs).tolist() == [-0.5] * 3
    assert first.logprobs_mode is LogprobsMode.PROCESSED
    assert [(s.start, s.policy) for s in first.policy_spans] == [(0, "assistant@v3")]
    assert (first.worker_id, first.server_id, first.finish_reason) == ("w", "local", "stop")
    assert first.recorded_by is RecordedBy.WORKER
    assert len({r.result_id for r in results}) == 3
    call = server.calls[0]
    assert (call["n"], call["temperature"], call["max_tokens"], call["stop"]) == (3, 0.7, 9, ("\n",))
    assert call["seed"] == seed_of(of.task_id) == seed_of("t0") != seed_of("t1")
    assert call["prompt"] == [{"role": "user", "content": "Why do cats purr?"}]


def test_a_worker_answers_what_is_asked_of_it_and_no_turn_of_a_conversation() -> None:
    options = WorkerOptions("chat", "http://server", "local", "w")
    anybody = task()
    mine = anybody.model_copy(update={"target_worker": "w"})
    said = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)
    turn = anybody.model_copy(update={"terms": said})
    assert [is_mine(each, options, targeted=False) for each in (anybody, mine, turn)] == [True, False, False]
    mine_too = turn.model_copy(update={"target_worker": "w"})
    assert [is_mine(each, options, targeted=True) for each in (anybody, mine, mine_too)] == [False, True, False]
    assert not is_mine(anybody.model_copy(update={"environment": "math"}), options, targeted=False)


def test_the_same_answer_has_the_same_result_id() -> None:
    of = task()
    first, again = (within(answerer(LoopServer(["assistant@v3"]), served_at(3)).answer(of, T0)) for _ in range(2))
    assert [r.result_id for r in first] == [r.result_id for r in again]


def test_a_server_that_comes_back_is_waited_for() -> None:
    server = LoopServer(["assistant@v1"])
    server.failures.extend([ServerUnavailable("away"), UnknownModel(404, "lost its adapters")])
    results = within(answerer(server, served_at(1)).answer(task(), T0))
    assert [r.status for r in results] == [Status.OK, Status.OK]
    assert len(server.calls) == 3


def test_an_adapter_swapped_meanwhile_is_used_at_the_retry() -> None:
    server = LoopServer(["assistant@v2"])
    served = served_at(1)

    async def play() -> Any:
        worker = answerer(server, served)
        answering = asyncio.create_task(worker.answer(task(), T0))
        await server.called.wait()
        served.apply(ack(2))
        worker._policies.changed()
        return await answering

    results = within(play())
    assert results[0].policy_spans[0].policy == "assistant@v2"


def test_patience_ends_in_results_that_blame_the_infrastructure() -> None:
    server = LoopServer(["assistant@v1"])
    server.away = ServerUnavailable("connection refused")
    results = within(answerer(server, served_at(1), patience=0.5).answer(task(), T0))
    assert [r.status for r in results] == [Status.INFRA] * 2
    assert "connection refused" in (results[0].error or "")
    assert results[0].policy_spans == () and results[0].logprobs_mode is LogprobsMode.NONE


def behind_a_proxy(*statuses: int) -> tuple[OpenAIClient, list[int]]:
    """A client of a server that answers calls with these statuses, the last one for ever; and what it answered."""
    answered: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        answered.append(statuses[min(len(answered), len(statuses) - 1)])
        if answered[-1] != 200:
            return httpx.Response(answered[-1], text="<html>nginx</html>")
        choices = [{"index": i, "message": {"content": "Hi."}, "finish_reason": "stop"} for i in range(2)]
        return httpx.Response(200, json={"model": "assistant@v1", "choices": choices})

    client = OpenAIClient("http://model")
    client._http = httpx.AsyncClient(base_url=client.base_url, transport=httpx.MockTransport(answer))
    return client, answered


@pytest.mark.parametrize("status", [429, 500, 502, 504])
def test_a_server_that_fails_for_a_moment_is_asked_again(status: int) -> None:
    client, answered = behind_a_proxy(status, status, 200)
    results = within(answerer(client, served_at(1)).answer(task(), T0))
    assert [r.status for r in results] == [Status.OK] * 2 and answered == [status, status, 200]


@pytest.mark.parametrize(("status", "calls"), [(502, 2), (500, 2), (401, 1), (403, 1)])
def test_a_fault_of_the_server_has_an_unknown_reward(status: int, calls: int) -> None:
    client, answered = behind_a_proxy(status)
    results = within(answerer(client, served_at(1), patience=0.5).answer(task(), T0))
    assert [r.status for r in results] == [Status.INFRA] * 2 and len(answered) == calls
    assert str(status) in (results[0].error or "")
    verdict = registry.settled_verdict(None, results[0])
    assert verdict is not None and verdict.reward is None


def test_an_error_of_the_server_is_waited_for_shortly_and_an_absence_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_calls_module, "ERROR_PATIENCE_S", 0.5)
    for status, least, most in ((500, 2, 2), (502, 3, 9)):
        client, answered = behind_a_proxy(status)
        within(answerer(client, served_at(1), patience=1.0).answer(task(), T0))
        assert least <= len(answered) <= most


def test_a_refusal_fails_at_once() -> None:
    server = LoopServer(["assistant@v1"])
    server.failures.append(RequestRefused(400, "the prompt is too long"))
    results = within(answerer(server, served_at(1)).answer(task(), T0))
    assert len(server.calls) == 1
    assert results[0].status is Status.FAILED
    assert "too long" in (results[0].error or "")


def test_a_server_that_returns_too_little_or_nonsense_fails_only_those_samples() -> None:
    server = LoopServer(["assistant@v1"])
    server.missing = 1
    results = within(answerer(server, served_at(1)).answer(task(n=3), T0))
    assert [r.status for r in results] == [Status.OK, Status.OK, Status.INFRA]
    assert "2 of 3" in (results[2].error or "")


@pytest.mark.parametrize("issued_at", [None, "assistant@v2"])
def test_it_waits_until_a_version_is_served_and_the_one_at_issue_is_known(issued_at: str | None) -> None:
    server = LoopServer(["assistant@v1", "assistant@v2"])
    served = ServedVersions("local") if issued_at is None else served_at(1)

    async def play() -> Any:
        worker = answerer(server, served)
        of = task(metadata={} if issued_at is None else {ISSUED_FOR: issued_at})
        answering = asyncio.create_task(worker.answer(of, T0))
        await asyncio.sleep(0.05)
        assert not server.calls
        served.apply(ack(2))
        worker._policies.changed()
        return await answering

    assert within(play())[0].policy_spans[0].policy == "assistant@v2"


class BesideATrial:
    """A worker that answers tasks that were issued for version 2 while version 1 is served and 2 is tried."""

    def __init__(self, server: LoopServer, assigned: AssignedVersions | None = None, places: int = 1) -> None:
        self.server, self.places = server, Places(places)
        self.served, self.candidates = served_at(1), Candidates("local")
        for record in (update(1), ack(1), update(2)):
            self.candidates.apply(record)
        self.worker = answerer(server, self.served, assigned=assigned, candidates=self.candidates, places=self.places)

    async def started(self, name: str = "t0", deadline_ms: int = 60_000) -> "asyncio.Task[list[Result]]":
        """Returns the answering of a task, once the server was asked."""
        of = task(name, metadata=issue_metadata("assistant", 2), terms=Terms(deadline_ms=deadline_ms))
        self.places.take()
        self.server.called.clear()
        answering = asyncio.create_task(self.worker.answer(of, now_ms()))
        await self.server.called.wait()
        await asyncio.sleep(0.05)
        return answering

    async def decide(self, *records: PolicyAck | Promotion | PolicyUpdate) -> None:
        for record in records:
            self.served.apply(record)
            self.candidates.apply(record)
        self.worker._policies.changed()
        await asyncio.sleep(0.05)


def asked_by(server: LoopServer) -> list[str]:
    return [call["model"] for call in server.calls]


def answered_by(results: list[Result]) -> set[str]:
    return {each.policy_spans[0].policy for each in results}


def both() -> LoopServer:
    return LoopServer(["assistant@v1", "assistant@v2"])


def test_a_round_that_was_issued_for_a_candidate_is_sampled_beside_its_trial() -> None:
    async def play() -> None:
        trial = BesideATrial(both())
        answering = await trial.started()
        assert not answering.done(), "nobody may see the answer of a version on which no decision was made"
        await trial.decide(promotion(2))
        assert not answering.done(), "the server does not serve it yet"
        await trial.decide(ack(2))
        assert answered_by(await answering) == {"assistant@v2"} and asked_by(trial.server) == ["assistant@v2"]

    within(play())


@pytest.mark.parametrize("branch", [False, True])
def test_the_answers_of_a_refused_candidate_are_dropped(branch: bool) -> None:
    """The next version of the policy may be on the log before the worker has read the refusal."""
    server = LoopServer(["assistant@v1", "assistant@v2", "assistant@v3"])

    async def play() -> list[Result]:
        trial = BesideATrial(server)
        answering = await trial.started()
        await trial.decide(promotion(1, mode="rollback"), *([update(3, run_id="run-1.1")] if branch else []))
        assert answering.done() is not branch
        await trial.decide(*([promotion(3), ack(3)] if branch else []))
        return await answering

    assert answered_by(within(play())) == {"assistant@v3" if branch else "assistant@v1"}
    assert asked_by(server)[0] == "assistant@v2" and len(server.calls) == 2


def test_a_candidate_that_the_server_fails_to_load_for_a_time_keeps_its_answers() -> None:
    async def play() -> None:
        trial = BesideATrial(both())
        answering = await trial.started()
        await trial.decide(promotion(2), ack(2, ok=False), ack(1))
        assert not answering.done()
        await trial.decide(ack(2))
        assert answered_by(await answering) == {"assistant@v2"} and len(trial.server.calls) == 1

    within(play())


def test_a_task_that_comes_after_the_refusal_is_answered_at_once() -> None:
    async def play() -> None:
        trial = BesideATrial(both())
        await trial.decide(promotion(1, mode="rollback"))
        assert answered_by(await (await trial.started())) == {"assistant@v1"}

    within(asyncio.wait_for(play(), 1.0))


def test_a_task_waits_for_the_decision_until_its_own_deadline() -> None:
    async def play() -> list[Result]:
        return await (await BesideATrial(both()).started(deadline_ms=200))

    results = within(play())
    assert [each.status for each in results] == [Status.INFRA] * 2
    assert "assistant@v2" in (results[0].error or "") and "deadline" in (results[0].error or "")


def test_a_server_that_stays_behind_another_one_answers_with_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_calls_module, "WAIT_FOR_SERVER_S", 0.2)

    async def play() -> None:
        trial = BesideATrial(LoopServer(["assistant@v1"]))
        answering = await trial.started()
        await trial.decide(promotion(2), ack(2, server_id="other"))
        assert not answering.done()
        assert answered_by(await answering) == {"assistant@v1"}

    within(play())


def test_a_finished_answer_that_is_held_has_no_place() -> None:
    async def play() -> None:
        trial = BesideATrial(both())
        first = await trial.started("t0")
        assert trial.places.free and trial.places.lent == 1
        trial.server.gate = asyncio.Event()
        second = await trial.started("t1")
        assert not trial.places.free, "it is sampled"
        trial.server.gate.set()
        await asyncio.sleep(0.05)
        assert trial.places.free and trial.places.lent == 2
        trial.server.gate.clear()
        await trial.decide(promotion(1, mode="rollback"))
        assert not trial.places.free and len(trial.server.calls) == 3, "they are asked again one after the other"
        trial.server.gate.set()
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        trial.places.leave()
        assert {name for each in (first, second) for name in answered_by(await each)} == {"assistant@v1"}
        assert len(trial.server.calls) == 4 and trial.places.lent == 0

    within(play())


def test_a_task_lends_its_place_until_the_server_has_loaded_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_calls_module, "LOADED_POLL_S", 0.03)

    async def play() -> None:
        trial = BesideATrial(LoopServer(["assistant@v1"]))
        answering = await trial.started()
        assert trial.places.free
        trial.server.loaded["assistant@v2"] = ""
        await asyncio.sleep(0.1)
        await trial.decide(promotion(2), ack(2))
        assert answered_by(await answering) == {"assistant@v2"} and "assistant@v1" not in asked_by(trial.server)

    within(play())


def test_a_failure_of_the_server_beside_a_trial_is_retried_before_the_decision() -> None:
    server = both()
    server.failures.append(ServerUnavailable("away"))

    async def play() -> None:
        trial = BesideATrial(server)
        answering = await trial.started()
        await asyncio.sleep(0.3)
        assert asked_by(server) == ["assistant@v2"] * 2
        await trial.decide(promotion(2), ack(2))
        assert answered_by(await answering) == {"assistant@v2"} and len(server.calls) == 2

    within(play())


def test_a_candidate_that_the_server_lost_after_the_decision_fails_the_task_in_time() -> None:
    async def play() -> list[Result]:
        trial = BesideATrial(LoopServer(["assistant@v1"]))
        trial.worker._policies._patience_s = 0.3
        answering = await trial.started()
        await trial.decide(promotion(2), ack(2))
        return await answering

    assert [each.status for each in within(play())] == [Status.INFRA] * 2


def test_the_time_of_an_answer_is_without_that_for_which_it_was_held() -> None:
    async def play() -> None:
        trial = BesideATrial(both())
        answering = await trial.started()
        await asyncio.sleep(0.3)
        await trial.decide(promotion(2), ack(2))
        assert max(each.elapsed_s for each in await answering) < 0.2

    within(play())


@pytest.mark.parametrize(("version", "asked"), [(None, "assistant@v2"), (1, "assistant@v1")])
def test_an_assignment_to_the_latest_version_honours_the_candidate(version: int | None, asked: str) -> None:
    assigned = AssignedVersions()
    assigned.apply(assignment(version, AssignmentScope.WORKER, "w"))

    async def play() -> None:
        trial = BesideATrial(both(), assigned)
        answering = await trial.started()
        assert asked_by(trial.server) == [asked] and answering.done() is (version is not None)
        await trial.decide(promotion(2), ack(2))
        assert answered_by(await answering) == {asked}

    within(play())


def test_malformed_metadata_fails_the_task_and_not_the_worker() -> None:
    server = LoopServer(["assistant@v1"])
    results = within(answerer(server, served_at(1)).answer(task(metadata={ISSUED_FOR: "latest"}), T0))
    assert results[0].status is Status.FAILED
    assert "'served'" in (results[0].error or "")


def test_a_failed_result_stands_in_for_one_that_cannot_be_written() -> None:
    server = LoopServer(["assistant@v1"])
    ok = within(answerer(server, served_at(1)).answer(task(), T0))[1]
    instead = failed_instead(ok, "too large")
    assert (instead.status, instead.error, instead.sample_index) == (Status.FAILED, "too large", 1)
    assert instead.text == "" and instead.response_token_ids == b"" and instead.result_id != ok.result_id


def test_large_tool_calls_are_left_out_of_a_result() -> None:
    """Not the answer: an environment may have made them large, which is no failure of the policy."""
    server = LoopServer(["assistant@v1"])
    ok = within(answerer(server, served_at(1)).answer(task(), T0))[1]
    calls = (ToolCall(name="look", arguments='{"at": 1}', result="x" * 17_000_000), ToolCall(name="note"))
    sent: list[Result] = []

    def send(result: Result) -> None:
        checked_size(topics.RESULTS, result.key, Codec().encode(topics.RESULTS, result))
        sent.append(result)

    send_fitting(send, ok)
    send_fitting(send, ok.model_copy(update={"tool_calls": calls}))
    assert sent[0] == ok and sent[1].model_copy(update={"tool_calls": ()}) == ok
    assert [(each.name, each.arguments, each.result) for each in sent[1].tool_calls] == [
        ("look", '{"left_out": 9}', '{"left_out": 17000000}'),
        ("note", '{"left_out": 2}', None),
    ]
    send_fitting(send, ok.model_copy(update={"tool_calls": calls, "text": "x" * 17_000_000}))
    assert (sent[2].status, sent[2].tool_calls) == (Status.FAILED, ()) and "the limit is" in (sent[2].error or "")
    assert len(sent) == 3


def test_a_task_that_fills_a_record_gets_a_small_failed_result() -> None:
    server = LoopServer(["assistant@v1"])
    server.failures.append(RequestRefused(400, "the prompt is too long"))
    large = task(messages=[{"role": "user", "content": "x" * 16_700_000}], metadata={"note": "y" * 1000})
    failed = within(answerer(server, served_at(1)).answer(large, T0))[1]
    small = without_texts(failed)
    assert len(Codec().encode(topics.RESULTS, small)) < 2000
    assert (small.status, small.error, small.result_id) == (Status.FAILED, failed.error, failed.result_id)
    assert (small.task.task_id, small.task.terms, small.key) == (large.task_id, large.terms, failed.key)


def test_served_follows_good_acknowledgements_of_its_server_also_backwards() -> None:
    served = ServedVersions("local")
    assert served.name("assistant") is None
    assert served.apply(ack(4)) and served.name("assistant") == "assistant@v4"
    assert not served.apply(ack(4))
    assert not served.apply(ack(5, ok=False)), "a refused version changes nothing"
    assert not served.apply(ack(6, server_id="other"))
    assert served.apply(ack(3)) and served.version("assistant") == 3, "a rollback is served too"
    assert served.version("other-policy") is None


def assigned_to(version: int) -> AssignedVersions:
    assigned = AssignedVersions()
    for record in (assignment(version, AssignmentScope.WORKER, "w"), assignment_ack(version)):
        assigned.apply(record)
    return assigned


def test_an_assigned_version_answers_all_samples_of_a_task() -> None:
    server = LoopServer(["assistant@v3", "assistant@v2"])
    results = within(answerer(server, served_at(3), assigned=assigned_to(2)).answer(task(n=3), T0))
    assert {r.policy_spans[0].policy for r in results} == {"assistant@v2"}


def test_the_served_version_answers_at_once_if_the_server_lost_the_assigned_one() -> None:
    server = LoopServer(["assistant@v3"])
    results = within(answerer(server, served_at(3), assigned=assigned_to(2)).answer(task(), T0))
    assert [call["model"] for call in server.calls] == ["assistant@v2", "assistant@v3"]
    assert {(r.status, r.policy_spans[0].policy) for r in results} == {(Status.OK, "assistant@v3")}


def test_a_late_assignment_wakes_a_task_that_waits_for_a_version() -> None:
    server, assigned = LoopServer(["assistant@v2"]), AssignedVersions()
    waiting = answerer(server, ServedVersions("local"), assigned=assigned)

    async def arrives() -> Any:
        answering = asyncio.create_task(waiting.answer(task(), T0))
        await asyncio.sleep(0)
        for record in (assignment(2, AssignmentScope.ENVIRONMENT, "chat"), assignment_ack(2)):
            assigned.apply(record)
        waiting._policies.changed()
        return await answering

    assert {r.policy_spans[0].policy for r in within(arrives())} == {"assistant@v2"}
