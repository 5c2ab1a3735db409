"""Plays episodes of programs: starts one with a key of the episode, and joins its recorded calls when it has ended.

The program calls the gateway, not the worker. The gateway writes each turn to the log before the program gets the end
of the answer. So after the program has ended, the log up to its end has every turn that the program has seen.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from schemas.ids import parse_policy_name
from schemas.records import Ending, SessionEvent, Status, Task, ToolCall
from tentalis.agents.environments import EnvironmentFault, ProgramAccess, ProgramEnd, RunsProgram
from tentalis.agents.workers.episode_gateway import EpisodeGateway, GatewayUnusable
from tentalis.agents.workers.episode_tokens import EpisodeTokens
from tentalis.agents.workers.episode_turns import NothingSampled, joined_turns
from tentalis.agents.workers.policy_calls import PolicyCalls
from tentalis.agents.workers.session_log import SessionLog, SessionUnread
from tentalis.inference.episode_key import EpisodeGrant, signed_key

log = logging.getLogger(__name__)

SESSION_PREFIX = "episode/"
"""The beginning of the names of sessions of episodes."""
_MARGIN_S = 60.0
"""Seconds for which a key is valid after the time limit of the program."""
_NAME_CHARACTERS = 150


@dataclass(frozen=True, slots=True)
class PlayedProgram:
    """An episode of a program.

    Attributes:
        tokens: those of its turns; empty where nothing is recorded.
        texts: the answers that it got, in order.
        calls: the tool calls in them.
        left_out: the number of answers that do not belong to the episode.
    """

    tokens: EpisodeTokens
    texts: tuple[str, ...]
    ending: Ending
    calls: tuple[ToolCall, ...] = ()
    left_out: int = 0


class ProgramPlayer(Protocol):
    """Plays the programs of environments."""

    async def play(
        self, environment: RunsProgram, task: Task, sample: int, attempt: int, max_turns: int
    ) -> PlayedProgram:
        """Plays one attempt, whose environment was reset. Calls beyond `max_turns` are refused. Raises EnvironmentFault
        if the infrastructure failed, InferenceError as PolicyCalls."""
        ...


class ProgramEpisodes:
    """Plays the programs of environments through a gateway. `secret`: signs the keys; the gateway has the same."""

    def __init__(
        self, gateway: EpisodeGateway, sessions: SessionLog, policies: PolicyCalls, secret: bytes, worker_id: str
    ) -> None:
        self._gateway, self._sessions, self._policies = gateway, sessions, policies
        self._secret, self._worker_id = secret, worker_id

    async def play(
        self, environment: RunsProgram, task: Task, sample: int, attempt: int, max_turns: int
    ) -> PlayedProgram:
        """Plays one attempt, whose environment was reset. Each has its own key and session, also after the worker was
        killed: so turns of different attempts never mix. The gateway refuses calls beyond `max_turns`.

        Raises EnvironmentFault if the infrastructure failed: the gateway or the log is away, a call failed in the
        gateway or behind it and the program did not recover, the program could not be started or called no model.
        Raises InferenceError as PolicyCalls.
        """
        session_id = _session_id(task, sample, attempt)
        model = await self._policies.call(task, _same)
        grant = EpisodeGrant(
            session_id=session_id,
            task_id=task.task_id,
            policy=task.policy,
            environment=task.environment,
            worker_id=self._worker_id,
            user_id=task.user_id,
            least_version=_version_of(model, task.policy),
            sampling=task.sampling,
            max_turns=max_turns,
            expires=time.time() + environment.program_s + _MARGIN_S,
        )
        key = signed_key(grant, self._secret)
        try:
            start = await asyncio.to_thread(self._sessions.start, session_id)
            await self._gateway.check(key)
            async with self._gateway.watched() as watch:
                end = await environment.run_program(ProgramAccess(self._gateway.url, key, task.policy))
            turns = await asyncio.to_thread(self._sessions.turns, start)
        except (GatewayUnusable, SessionUnread) as error:
            raise EnvironmentFault(str(error)) from error
        if (fault := _fault(end, turns, watch.away)) is not None:
            raise EnvironmentFault(fault)
        answered = [turn for turn in turns if turn.status is Status.OK]
        try:
            joined = joined_turns(answered, task.sampling)
        except NothingSampled as error:
            raise EnvironmentFault(str(error)) from error
        if joined.left_out:
            log.warning(
                "task %s, sample %d: %d of %d turns do not belong to the longest conversation, and are not trained on",
                task.task_id,
                sample,
                joined.left_out,
                len(answered),
            )
        return PlayedProgram(
            joined.tokens,
            tuple(turn.response for turn in joined.turns),
            program_ending(end, turns_used_up=len(turns) >= max_turns),
            tuple(call for turn in joined.turns for call in turn.tool_calls),
            joined.left_out,
        )


def _fault(end: ProgramEnd, turns: Sequence[SessionEvent], away: str | None) -> str | None:
    """Returns the fault of the infrastructure that ended a program, or None."""
    answered = [turn.status is Status.OK for turn in turns]
    if failed_in_calls(end, answered):
        failed = answered.count(False)
        return f"{failed} of {len(turns)} calls of the program failed in the gateway or behind it{end.remark}"
    if away is not None and not end.succeeded:
        return f"the gateway was away while the program ran: {away}{end.remark}"
    if not turns:
        return f"the program made no call of the gateway that could be answered{end.remark}"
    return None


def failed_in_calls(end: ProgramEnd, answered: Sequence[bool]) -> bool:
    """Returns True if a call of a program failed, and the program did not recover: it ended without success, or its
    last call failed. `answered`: of each call, in order."""
    return not all(answered) and not (end.succeeded and answered[-1])


def program_ending(end: ProgramEnd, *, turns_used_up: bool) -> Ending:
    """Returns the ending of the episode of a program."""
    if end.timed_out:
        return Ending.TIMED_OUT
    if end.exit_code == 0:
        return Ending.DONE
    return Ending.TURN_LIMIT if turns_used_up else Ending.FAILED


async def _same(model: str) -> str:
    return model


def _session_id(task: Task, sample: int, attempt: int) -> str:
    name = quote(task.task_id, safe="")[:_NAME_CHARACTERS]
    return f"{SESSION_PREFIX}{name}/{sample}/{attempt}-{uuid.uuid4().hex[:12]}"


def _version_of(model: str, policy: str) -> int | None:
    """Returns the version that a model's name says, None for a plain model or another policy's."""
    try:
        name, version = parse_policy_name(model)
    except ValueError:
        return None
    return version if name == policy else None
