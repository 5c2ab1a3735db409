"""The environment of a run of `tentalis learn`: what scores its answers, and which rows its tasks can have."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.records import Task
from tentalis.agents.environments import Environment
from tentalis.agents.environments.registry import data_problem, has_episodes, prepared_environment
from tentalis.agents.scenarios.prompt_file import Prompt
from tentalis.agents.scenarios.prompts import messages_of, verifier_of
from tentalis.learning.errors import LearnError
from tentalis.learning.options import PLAIN, LearnOptions
from tentalis.learning.prepare import source_digest
from tentalis.rewards import registry
from tentalis.rewards.environment_file import EPISODE
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.rewards.verdict import BadVerifierData, UnknownEnvironment

TOOLS_VARIABLE = "TOOLS_CONFIG"
OF_CONVERSATIONS = frozenset({"sessions"})
"""Applications that a gateway brings, and that the turns of programs do not need."""


@dataclass(frozen=True, slots=True)
class LearnEnvironment:
    """The environment of a run. `scorer`: the verifier with which it gives the reward itself, None if it has none.
    `data`: defaults of that verifier's data. `files`: that define it."""

    name: str
    scorer: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @property
    def kind(self) -> dict[str, Any] | None:
        """The part of a run's kind; None for the plain environment."""
        return None if self.name == PLAIN else {"name": self.name, "files": [str(file) for file in self.files]}


def environment_of(options: LearnOptions) -> LearnEnvironment:
    """Returns the environment of a run, and registers those of its file in this process.

    Raises LearnError, BadEnvironmentFile.
    """
    if options.environment_file is not None:
        registry.use_environments(Path(options.environment_file))
    name = options.environment
    try:
        registry.check_environment(name)
    except UnknownEnvironment as error:
        raise LearnError(f"--environment {name}: {error}") from error
    declared = registry.declared_environments().get(name)
    if declared is not None:
        files = (declared.file, *([declared.tools] if declared.tools not in (None, declared.file) else []))
        return LearnEnvironment(name, declared.scorer, declared.data, tuple(file for file in files if file is not None))
    return LearnEnvironment(name, EPISODE if EPISODE in ENVIRONMENTS[name] else None)


def digest_of(files: Iterable[Path]) -> str:
    """Returns the sha256 of files, in hexadecimal digits."""
    return hashlib.sha256("".join(map(source_digest, files)).encode()).hexdigest()


def episodes_of(options: LearnOptions) -> Callable[[], Environment] | None:
    """Returns a function that makes the environment of an episode; None if one completion answers a prompt.

    Raises LearnError, and what `prepared_environment` raises.
    """
    if has_episodes(options.environment) and os.environ.get(TOOLS_VARIABLE):
        raise LearnError(
            f"{TOOLS_VARIABLE} is set, and would not be recorded with the run: unset it, and name the tools in a file "
            "of environments (--environment-file)"
        )
    return prepared_environment(options.environment, allow_unsandboxed=options.allow_unsandboxed)


def programs_play(name: str) -> bool:
    """Returns True if the turns of an environment are made by a program, which calls a gateway."""
    declared = registry.declared_environments().get(name)
    return declared is not None and declared.program is not None


def unfit_for(environment: LearnEnvironment) -> Callable[[Prompt], str | None]:
    """Returns a function that gives the reason why an environment that gives the reward cannot score answers to a
    prompt, or None."""
    scorer = environment.scorer
    assert scorer is not None, "the environment gives the reward"

    def reason(prompt: Prompt) -> str | None:
        if scorer == EPISODE:
            return data_problem(environment.name, {**environment.data, **prompt.columns})
        task = Task(
            task_id="row",
            event_time=0,
            policy="learn",
            environment=environment.name,
            messages=messages_of(prompt),
            verifier=verifier_of(prompt, scorer, environment.data),
        )
        try:
            registry.check(task)
        except BadVerifierData as error:
            return str(error)
        return None

    return reason
