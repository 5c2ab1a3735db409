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
from tentalis.agents.workers.program_episodes import PlayedProgram, program_ending
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
            answers, statuses = tuple(relay.answers), [*relay.statuses]
        said = f". The program said: {end.said}" if end.said else ""
        unsuccessful = end.timed_out or end.exit_code != 0
        # As ProgramEpisodes: a failed call from which the program recovered is no fault.
        if statuses and (statuses[-1] != HTTPStatus.OK or (unsuccessful and len(answers) < len(statuses))):
            raise EnvironmentFault(f"{relay.failure}{said}")
        if not answers:
            raise EnvironmentFault(f"the program made no call that the model server answered{said}")
        return PlayedProgram(EpisodeTokens(), answers, program_ending(end, turns_used_up=len(statuses) >= max_turns))
