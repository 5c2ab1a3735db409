"""An episode: its loop, tokens, mask, endings, and the difference between a bad policy and bad infrastructure."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Attachment, Ending, LogprobsMode, Message, RecordedBy, Result, Status, Task, ToolCall
from schemas.tensors import float32_view, int32_view
from tentalis.agents.environments import EnvironmentFault, LeftFile, Observation, Transition
from tentalis.agents.workers import episodes, run
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.inference.protocol import RequestRefused, ServerUnavailable
from tentalis.policies.served import ServedVersions
from tentalis.rewards.episode import EpisodeScorer
from tentalis.service.settings import Settings
from tentalis.storage.attachments import AttachmentStore, read_attachment
from tentalis.storage.errors import StorageError
from tentalis.storage.location import Location
from tests.support.episode_server import END, EpisodeServer, decoded
from tests.support.loop_records import T0, ack, task
from tests.support.worker_lab import policy_calls


class Countdown:
    """Says `left N` until the policy has said `stop` or `turns` are over; rewards each turn and the stop."""

    wall = "glass/1"
    made: list["Countdown"]

    def __init__(self, turns: int = 3, **faults: Any) -> None:
        self.turns, self.faults, self.stopped, self.closed = turns, faults, False, 0

    def _fail(self, where: str) -> None:
        fault = self.faults.get(where)
        if isinstance(fault, list):
            fault = fault.pop() if fault else None
        if fault is not None:
            raise fault

    async def reset(self, of: Task) -> Observation:
        self._fail("reset")
        return Observation((Message(role="system", content="Count."), *of.messages))

    async def step(self, action: str) -> Transition:
        self._fail("step")
        if "sleep" in action:
            await asyncio.sleep(60)
        self.turns -= 1
        self.stopped = action == "stop"
        seen = (Message(role="user", content=f"left {self.turns}"),)
        call = ToolCall(name="count", arguments="{}", result=str(self.turns))
        return Transition(Observation(seen), {"turn": 0.25}, self.stopped, (call,))

    async def score(self) -> Mapping[str, float]:
        self._fail("score")
        return {"reward": float(self.stopped), "left": float(self.turns)}

    async def close(self) -> None:
        self.closed += 1


def served_at(version: int) -> ServedVersions:
    served = ServedVersions("local")
    served.apply(ack(version))
    return served


def play(
    server: EpisodeServer, of: Task | None = None, limits: EpisodeLimits | None = None, **countdown: Any
) -> tuple[list[Result], list[Countdown]]:
    made: list[Countdown] = []

    def make() -> Countdown:
        made.append(Countdown(**countdown))
        return made[-1]

    calls = policy_calls(served_at(1), patience_s=0.1)
    player = EpisodePlayer(server, calls, make, limits or EpisodeLimits(), worker_id="w", server_id="local")
    of = of or task(n=1)
    results = asyncio.run(asyncio.wait_for(player.answer(of, T0), 60))
    assert [each.closed for each in made] == [1] * len(made), "every environment is closed once"
    return results, made


def stops_after(turns: int) -> EpisodeServer:
    return EpisodeServer(["assistant@v1"], lambda text, turn: "stop" if turn >= turns else f"go {turn}")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "FIRST_PAUSE_S", 0.0)


def test_an_episode_is_one_result_with_the_tokens_of_every_turn_and_a_mask() -> None:
    server = stops_after(2)
    (made,), _ = play(server)
    tokens, mask = int32_view(made.response_token_ids).tolist(), list(made.loss_mask)
    assert [decoded(tokens[turn.start : turn.end]) for turn in made.turns] == [
        "go 0<|im_end|>",
        "go 1<|im_end|>",
        "stop<|im_end|>",
    ]
    environment = decoded([token for token, chosen in zip(tokens, mask, strict=True) if not chosen])
    follows = "\n<|im_start|>user\nleft {}<|im_end|>\n<|im_start|>assistant\n"
    assert environment == follows.format(2) + follows.format(1)
    logprobs = float32_view(made.sampler_logprobs).tolist()
    assert [value == -0.5 for value in logprobs] == [bool(chosen) for chosen in mask]
    assert made.recorded_by is RecordedBy.WORKER
    assert [value for value, chosen in zip(logprobs, mask, strict=True) if not chosen] == [0.0] * mask.count(0)
    assert (made.status, made.ending, made.text, made.steps) == (
        Status.OK,
        Ending.DONE,
        "stop",
        ("go 0", "go 1", "stop"),
    )
    assert made.logprobs_mode is LogprobsMode.PROCESSED and made.wall == "glass/1" and made.attempts == 1
    assert [(s.start, s.policy) for s in made.policy_spans] == [(0, "assistant@v1")]
    assert len(made.tool_calls) == 3 and made.rewards == {"reward": 1.0, "left": 0.0}
    assert [(s.start, s.parts) for s in made.step_rewards] == [(turn.start, {"turn": 0.25}) for turn in made.turns]


def test_prompts_grow_by_appending() -> None:
    server = stops_after(2)
    (made,), _ = play(server)
    first, second, third = server.prompts
    assert second[: len(first)] == first and third[: len(second)] == second
    whole = int32_view(made.prompt_token_ids).tolist() + int32_view(made.response_token_ids).tolist()
    assert whole[: len(third)] == third and made.rendered_turns == ()
    assert len(set(server.seeds)) == 3, "each turn draws anew"


def test_a_template_that_cannot_append_is_recorded_and_the_last_part_is_kept() -> None:
    server = stops_after(2)
    server.appends = False
    (made,), _ = play(server)
    assert made.rendered_turns == (1, 2) and made.steps == ("go 0", "go 1", "stop")
    assert decoded(int32_view(made.response_token_ids).tolist()) == "stop<|im_end|>" and made.loss_mask == b""
    assert "go 1<|im_end|>" in decoded(int32_view(made.prompt_token_ids).tolist())


def test_the_version_of_each_turn_is_recorded() -> None:
    server, served = stops_after(1), served_at(1)
    server.loaded.append("assistant@v2")

    class Swapping(Countdown):
        async def step(self, action: str) -> Transition:
            served.apply(ack(2))
            return await super().step(action)

    player = EpisodePlayer(server, policy_calls(served), Swapping, EpisodeLimits(), worker_id="w", server_id="local")
    (made,) = asyncio.run(player.answer(task(n=1), T0))
    assert [(s.start, s.policy) for s in made.policy_spans] == [
        (0, "assistant@v1"),
        (made.turns[1].start, "assistant@v2"),
    ]


def probes_rendered(server: EpisodeServer) -> list[str]:
    """The models for which the probe conversation alone was rendered, without new messages behind it."""
    return [model for model, texts in server.renderings if texts[0] == episodes._PROBE and len(texts) == 2]


def test_the_probe_alone_is_rendered_once_per_version() -> None:
    server = stops_after(3)
    server.loaded = ["assistant@v1", "assistant@v2"]
    served = served_at(1)
    calls = policy_calls(served, patience_s=0.1)
    player = EpisodePlayer(
        server, calls, lambda: Countdown(turns=9), EpisodeLimits(parallel=1), worker_id="w", server_id="local"
    )

    async def both() -> None:
        await player.answer(task(n=2), T0)
        served.apply(ack(2))
        await player.answer(task(n=1), T0)

    asyncio.run(asyncio.wait_for(both(), 60))
    assert len(server.renderings) > 20, "three observations in each of three episodes"
    assert probes_rendered(server) == ["assistant@v1"] * 2 + ["assistant@v2"] * 2


def test_a_template_that_changes_under_a_name_is_probed_again() -> None:
    server = stops_after(1)
    calls = policy_calls(served_at(1), patience_s=0.1)
    player = EpisodePlayer(server, calls, Countdown, EpisodeLimits(), worker_id="w", server_id="local")
    (before,) = asyncio.run(player.answer(task(n=1), T0))
    server.greeting = "Be brief."
    (after,) = asyncio.run(player.answer(task(n=1), T0))
    assert (before.rendered_turns, after.rendered_turns) == ((), ())
    assert len(after.turns) == 2, "both turns are trained on"


def test_truncated_timed_out_out_of_turns_and_refused_are_told_apart() -> None:
    server = stops_after(9)
    server.finish_reason = "length"
    assert play(server)[0][0].ending is Ending.TRUNCATED
    assert play(stops_after(9), limits=EpisodeLimits(max_turns=2))[0][0].ending is Ending.TURN_LIMIT
    slow = EpisodeServer(["assistant@v1"], lambda text, turn: "sleep")
    (late,), _ = play(slow, limits=EpisodeLimits(environment_s=0.05))
    assert (late.ending, late.status, late.rewards["reward"]) == (Ending.TIMED_OUT, Status.OK, 0.0)
    refusing = stops_after(1)
    refusing.failures.append(RequestRefused(400, "the prompt is not allowed"))
    (refused,), made = play(refusing)
    assert (refused.ending, refused.status, len(made)) == (Ending.REFUSED, Status.FAILED, 1)
    assert "not allowed" in (refused.error or "") and refused.rewards == {}


def test_a_context_that_is_full_truncates_a_later_turn_and_refuses_the_first() -> None:
    full = RequestRefused(400, "This model's context is 64 tokens; the prompt has 99.")
    first = stops_after(1)
    first.failures.append(full)
    assert play(first)[0][0].ending is Ending.REFUSED

    def policy(text: str, turn: int) -> str:
        later.failures.append(full)
        return "go on"

    later = EpisodeServer(["assistant@v1"], policy)
    (made,), _ = play(later)
    assert (made.ending, made.status, made.steps) == (Ending.TRUNCATED, Status.OK, ("go on",))
    assert int32_view(made.response_token_ids)[-1] == END and made.loss_mask == b"", "no tokens after the last turn"


@pytest.mark.parametrize("where", ["reset", "step", "score"])
@pytest.mark.parametrize(
    "fault", [EnvironmentFault("no sandbox"), ZeroDivisionError("a defect"), TimeoutError("upstream")]
)
def test_a_fault_of_the_environment_is_no_reward_and_no_failure(where: str, fault: Exception) -> None:
    (made,), attempts = play(stops_after(1), **{where: fault})
    assert (made.status, made.ending, made.rewards, made.attempts) == (Status.INFRA, Ending.INFRA, {}, 3)
    assert len(attempts) == 3 and str(fault) in (made.error or "")
    assert made.response_token_ids == b"" and EpisodeScorer().verify(made.task, made).reward is None


def test_a_second_attempt_that_succeeds_is_the_result() -> None:
    faults: list[Exception] = [EnvironmentFault("no sandbox")]
    (made,), attempts = play(stops_after(1), reset=faults)
    assert (made.status, made.attempts, len(attempts), made.rewards["reward"]) == (Status.OK, 2, 2, 1.0)


def test_a_server_that_stays_away_is_infrastructure() -> None:
    server = stops_after(1)
    server.failures.extend([ServerUnavailable("connection refused")] * 99)
    (made,), _ = play(server)
    assert made.status is Status.INFRA and "connection refused" in (made.error or "")


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_server_that_fails_on_a_request_is_infrastructure(status: int) -> None:
    server = stops_after(1)
    server.failures.extend([RequestRefused(status, "not now")] * 99)
    (made,), _ = play(server)
    assert (made.status, made.ending) == (Status.INFRA, Ending.INFRA) and "not now" in (made.error or "")


@pytest.mark.parametrize("reward", [float("nan"), 2.0, "1"])
def test_an_invalid_reward_is_a_fault_of_the_environment(reward: Any) -> None:
    class Wrong(Countdown):
        async def score(self) -> Mapping[str, float]:
            return {"reward": reward}

    limits = EpisodeLimits(attempts=1)
    calls = policy_calls(served_at(1))
    player = EpisodePlayer(stops_after(0), calls, Wrong, limits, worker_id="w", server_id="local")
    (made,) = asyncio.run(player.answer(task(n=1), T0))
    assert made.status is Status.INFRA and "reward" in (made.error or "")


class Leaving(Countdown):
    """Leaves a file of 5 bytes, and one of 50."""

    def left_files(self) -> tuple[LeftFile, ...]:
        assert self.stopped, "asked after the score"
        return (LeftFile.of("a.txt", "text/plain", b"small", 10), LeftFile.of("b.txt", "text/plain", b"x" * 50, 10))


def left_at(store: AttachmentStore | None, attempts: int = 1) -> Result:
    """The result of an episode that leaves files."""
    limits = EpisodeLimits(attempts=attempts)
    names = {"worker_id": "w", "server_id": "local"}
    player = EpisodePlayer(stops_after(0), policy_calls(served_at(1)), Leaving, limits, **names, attachments=store)
    (made,) = asyncio.run(player.answer(task(n=1), T0))
    return made


def test_files_of_an_episode_are_stored_before_its_result(tmp_path: Path) -> None:
    made = left_at(AttachmentStore(Location.of_folder(tmp_path), 10))
    small, large = made.attachments
    assert read_attachment(small) == b"small" and (small.name, small.media_type) == ("a.txt", "text/plain")
    assert large == Attachment(name="b.txt", media_type="text/plain", sha256="", bytes=50, url=None)
    assert left_at(None).attachments == ()


def test_a_store_that_is_away_is_infrastructure(tmp_path: Path) -> None:
    """A result never names a file that is not there, and the policy is not blamed."""
    (tmp_path / "file").write_text("in the place of the folder")
    made = left_at(AttachmentStore(Location.of_folder(tmp_path / "file"), 10), attempts=2)
    assert (made.status, made.ending, made.attempts, made.attachments) == (Status.INFRA, Ending.INFRA, 2, ())
    assert "cannot be written" in (made.error or "") and made.response_token_ids == b""


def test_a_worker_whose_store_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the place of the folder")
    settings = Settings(bootstrap="127.0.0.1:9", attachments=str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot be written"):
        run(settings, environment="echo", server="http://127.0.0.1:9")


def test_samples_are_played_side_by_side_up_to_the_limit_and_differ() -> None:
    server = stops_after(1)
    results, _ = play(server, task(n=6), EpisodeLimits(parallel=2))
    assert [r.sample_index for r in results] == list(range(6)) and server.most_playing <= 2
    assert len(set(server.seeds)) == 12


def test_the_scorer_takes_the_environments_reward_and_its_steps() -> None:
    (made,), _ = play(stops_after(1))
    verdict = EpisodeScorer().verify(made.task, made)
    assert verdict.reward == 1.0
    assert verdict.components == {"left": 1.0, "turns": 2.0, "ending.done": 1.0}
    start = len(made.prompt_token_ids) // 4
    assert [(s.start, s.end, s.score) for s in verdict.steps] == [
        (start + turn.start, start + turn.end, 0.25) for turn in made.turns
    ]
