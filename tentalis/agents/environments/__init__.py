"""Environments. In: a task, and the policy's text of each turn. Out: observations, reward parts and a score.

An environment knows no tokens, no policy and no Kafka: the worker owns the loop (`agents/workers/episodes.py`). Begin
reading with `protocol`; `registry` finds environments by name, `toolcall` is the first one.
"""

from tentalis.agents.environments.protocol import (
    Environment,
    EnvironmentFault,
    EnvironmentOptions,
    LeavesFiles,
    LeftFile,
    LimitsScore,
    NamesEpisode,
    Observation,
    OffersTools,
    ProgramAccess,
    ProgramEnd,
    RecordsEnding,
    RunsProgram,
    Transition,
)

__all__ = [
    "Environment",
    "EnvironmentFault",
    "EnvironmentOptions",
    "LeavesFiles",
    "LeftFile",
    "LimitsScore",
    "NamesEpisode",
    "Observation",
    "OffersTools",
    "ProgramAccess",
    "ProgramEnd",
    "RecordsEnding",
    "RunsProgram",
    "Transition",
]
