"""Chooses the server's model that is the teacher of a sample."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from schemas.ids import parse_policy_name
from schemas.records import Sample
from tentalis.service.lifecycle import Unmendable

NOT_SERVED = "not_served"


class TeacherRefused(Exception):
    """This sample can have no teacher log-probs, and a retry will not help. The message says why; `reason` is a
    one-word code."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TeacherModel(Protocol):
    """Chooses the teacher of a sample."""

    async def name(self, sample: Sample) -> str:
        """Returns the model to ask about a sample. Raises InferenceError, TeacherRefused, or an Unmendable if it can
        never teach."""
        ...

    async def on_unknown_model(self, name: str) -> None:
        """Handles a model name that the server does not know. Raises TeacherRefused if that is permanent; otherwise the
        sample is retried."""
        ...


class FixedModel:
    """The same model for all samples. `find` is called once, also for concurrent callers, and again after the server
    did not know the model. An Unmendable error is final: it is raised again without another call."""

    def __init__(self, find: Callable[[], Awaitable[str]]) -> None:
        self._find = find
        self._name: str | None = None
        self._refused: Unmendable | None = None
        self._lock = asyncio.Lock()

    async def name(self, sample: Sample) -> str:
        """See TeacherModel."""
        return await self.find()

    async def find(self) -> str:
        """Returns the model. Raises the errors of `find`."""
        async with self._lock:
            if self._refused is not None:
                raise self._refused
            if self._name is None:
                try:
                    self._name = await self._find()
                except Unmendable as error:
                    self._refused = error
                    raise
            return self._name

    async def on_unknown_model(self, name: str) -> None:
        """See TeacherModel."""
        self._name = None


class SamplerModel:
    """The weights that sampled the answer, scoring it again under the hint.

    Args:
        served: returns the names of the models that the server has now.
    """

    def __init__(self, served: Callable[[], Awaitable[list[str]]]) -> None:
        self._served = served

    async def name(self, sample: Sample) -> str:
        """See TeacherModel. If several versions sampled an answer, returns the last."""
        if not sample.policy_spans:
            raise TeacherRefused(NOT_SERVED, "the answer does not record which model sampled it")
        return sample.policy_spans[-1].policy

    async def on_unknown_model(self, name: str) -> None:
        """Raises TeacherRefused if a newer version is served: the old one will not return. A policy without any served
        version (the server has just started) is worth a retry."""
        try:
            policy, version = parse_policy_name(name)
            served = [parse_policy_name(model) for model in await self._served() if "@v" in model]
        except ValueError as error:
            raise TeacherRefused(NOT_SERVED, f"the model that sampled the answer is not served: {error}") from error
        newer = [
            served_version
            for served_policy, served_version in served
            if served_policy == policy and served_version > version
        ]
        if newer:
            newest = f"the server has v{max(newer)} now"
            raise TeacherRefused(NOT_SERVED, f"{name}, which sampled the answer, is no longer served: {newest}")
