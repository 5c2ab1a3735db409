"""An episode of a program: the faults of the infrastructure, told apart from those of the policy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.records import Ending, SessionEvent, Status
from tentalis.agents.environments import EnvironmentFault, ProgramAccess, ProgramEnd
from tentalis.agents.workers.episode_gateway import EpisodeGateway, GatewayUnusable, GatewayWatch
from tentalis.agents.workers.program_episodes import PlayedProgram, ProgramEpisodes
from tentalis.agents.workers.session_log import SessionLog, SessionStart, SessionUnread
from tentalis.inference.episode_key import EpisodeGrant, granted
from tests.support.loop_records import task
from tests.support.worker_lab import policy_calls
from tests.unit.agents.test_episode_turns import FIRST, SECOND, SIDE
from tests.unit.agents.test_episodes import served_at

SECRET = b"a secret of sixteen and more"
FAILED = FIRST.model_copy(update={"session_event_id": "failed", "status": Status.FAILED, "response_token_ids": b""})
MAX_TURNS = 3
DONE, WRONG, LATE = ProgramEnd(0, False, ""), ProgramEnd(1, False, "it gave up"), ProgramEnd(None, True, "")


@dataclass
class Recorded(SessionLog):
    """The turns of every session."""

    recorded: list[SessionEvent]
    unread: bool = False

    def start(self, session_id: str) -> SessionStart:
        return SessionStart(session_id, 0, 1, 7)

    def turns(self, start: SessionStart) -> list[SessionEvent]:
        if self.unread:
            raise SessionUnread("the log is away")
        return self.recorded


@dataclass
class Watched(EpisodeGateway):
    """A gateway that is away at a moment, or that refuses keys."""

    url: str = "http://gateway"
    away: str | None = None
    refuses: bool = False

    async def check(self, key: str) -> None:
        if self.refuses:
            raise GatewayUnusable("the gateway does not answer the episode: it answered 401")

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[GatewayWatch]:
        watch = GatewayWatch()
        watch.away = self.away
        yield watch


@dataclass
class Program:
    """An environment whose program ends as it is told."""

    end: ProgramEnd
    access: list[ProgramAccess] = field(default_factory=list)
    program_s = 30.0

    async def run_program(self, access: ProgramAccess) -> ProgramEnd:
        self.access.append(access)
        return self.end


def play(
    turns: list[SessionEvent], end: ProgramEnd = DONE, *, unread: bool = False, **gateway: Any
) -> tuple[PlayedProgram, EpisodeGrant]:
    calls = policy_calls(served_at(4), patience_s=0.1)
    episodes = ProgramEpisodes(Watched(**gateway), Recorded(turns, unread), calls, SECRET, "w")
    program = Program(end)
    found = asyncio.run(episodes.play(program, task("a task/1", environment="pong", user_id="ada"), 2, 3, MAX_TURNS))
    return found, granted(program.access[0].api_key, SECRET, 0.0)


def test_the_key_names_the_attempt_the_policy_and_the_user() -> None:
    (found, grant), (_, again) = play([FIRST, SECOND]), play([FIRST])
    assert found.ending is Ending.DONE and len(found.texts) == 2
    assert grant.session_id.startswith("episode/a%20task%2F1/2/3-") and grant.session_id != again.session_id
    assert (grant.policy, grant.environment, grant.user_id, grant.least_version) == ("assistant", "pong", "ada", 4)


@pytest.mark.parametrize(("end", "ending"), [(WRONG, Ending.TURN_LIMIT), (DONE, Ending.DONE), (LATE, Ending.TIMED_OUT)])
def test_a_program_that_gives_up_when_its_turns_are_used_up_is_told_apart(end: ProgramEnd, ending: Ending) -> None:
    found, grant = play([FIRST, SECOND, SIDE], end)
    assert (found.ending, grant.max_turns) == (ending, MAX_TURNS)


@pytest.mark.parametrize(("end", "ending"), [(WRONG, Ending.FAILED), (LATE, Ending.TIMED_OUT)])
def test_a_program_that_fails_by_itself_is_an_episode(end: ProgramEnd, ending: Ending) -> None:
    assert play([FIRST, SIDE], end)[0].ending is ending


def test_a_failed_call_from_which_the_program_recovered_is_no_fault() -> None:
    found = play([FIRST, FAILED, SECOND])[0]
    assert found.texts == ("first", "second") and not found.left_out


@pytest.mark.parametrize(
    ("turns", "end", "more", "says"),
    [
        ([FIRST, FAILED, SECOND], WRONG, {}, "1 of 3 calls .* failed .*: it gave up"),
        ([FIRST, FAILED], DONE, {}, "1 of 2 calls"),
        ([FAILED], DONE, {}, "1 of 1 calls"),
        ([FIRST], WRONG, {"away": "connection refused"}, "the gateway was away .*: connection refused"),
        ([], DONE, {}, "made no call of the gateway"),
        ([], WRONG, {}, "made no call of the gateway .*: it gave up"),
        ([FIRST], DONE, {"unread": True}, "the log is away"),
        ([FIRST], DONE, {"refuses": True}, "answered 401"),
    ],
)
def test_a_fault_of_the_infrastructure_is_told_apart(
    turns: list[SessionEvent], end: ProgramEnd, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        play(turns, end, **more)


def test_a_gateway_that_was_away_unnoticed_by_the_program_is_no_fault() -> None:
    assert play([FIRST], DONE, away="connection refused")[0].ending is Ending.DONE


def test_a_gateway_is_checked_and_watched() -> None:
    gateway = EpisodeGateway("http://127.0.0.1:9/v1/", patience_s=0.1)
    assert gateway.url == "http://127.0.0.1:9"
    with pytest.raises(GatewayUnusable, match=r"http://127\.0\.0\.1:9 is away"):
        asyncio.run(gateway.check("te-a.b"))

    async def watch() -> str | None:
        async with gateway.watched() as seen:
            await asyncio.sleep(1.5)
        return seen.away

    assert asyncio.run(watch())
