"""Plays programs for a look at their answers: they call the model server, and nothing is recorded."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from schemas.ids import derived_id
from schemas.records import Task
from tentalis.agents.environments import EnvironmentFault, ProgramAccess, RunsProgram
from tentalis.agents.environments.trial.relay import ProgramRelay
from tentalis.agents.workers.answer import seed_of
from tentalis.agents.workers.episode_tokens import EpisodeTokens
from tentalis.agents.workers.program_episodes import PlayedProgram, failed_in_calls, program_ending
from tentalis.gateway.calls.episode_calls import episode_body

_NO_KEY = "none"


class RelayedPrograms:
    """A ProgramPlayer without a gateway: one model of a server answers, with the sampling of the task. The server must
    have the route that the program calls."""

    def __init__(self, server: str, model: str) -> None:
        self._server, self._model = server, model

    async def play(
        self, environment: RunsProgram, task: Task, sample: int, attempt: int, max_turns: int
    ) -> PlayedProgram:
        """See ProgramPlayer.play."""
        seed = seed_of(derived_id("program", task.task_id, sample, attempt))

        def sampled(body: Mapping[str, Any]) -> Mapping[str, Any]:
            return episode_body(body, task.sampling) | {"seed": seed}

        with ProgramRelay(self._server, self._model, max_turns, lambda _: None, sampled) as relay:
            end = await environment.run_program(ProgramAccess(relay.url, _NO_KEY, self._model))
            answers, answered = tuple(relay.answers), [status == HTTPStatus.OK for status in relay.statuses]
        if failed_in_calls(end, answered):
            raise EnvironmentFault(f"{relay.failure}{end.remark}")
        if not answers:
            raise EnvironmentFault(f"the program made no call that the model server answered{end.remark}")
        return PlayedProgram(EpisodeTokens(), answers, program_ending(end, turns_used_up=len(answered) >= max_turns))
