"""Which model of the server is the teacher of a sample."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from schemas.ids import parse_policy_name
from schemas.records import Sample
from tentalis.service import Unmendable

NOT_SERVED = "not_served"


class TeacherRefused(Exception):
    """There can be no teacher log-probs for this sample, however often one asks. The message says why, and `reason` in
    a word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TeacherModel(Protocol):
    """Names the teacher."""

    async def name(self, sample: Sample) -> str:
        """The model to ask about a sample. Raises InferenceError, and whatever keeps it from being a teacher at all."""
        ...

    async def unknown(self, name: str) -> None:
        """The server does not know a model that was named. Raises TeacherRefused if that will not change; else it is
        asked about again."""
        ...


class OneModel:
    """The same for all samples: `find` is asked once, however many wait for it, and again after the server said that it
    does not know it. What cannot be mended is not tried again."""

    def __init__(self, find: Callable[[], Awaitable[str]]) -> None:
        self._find = find
        self._name: str | None = None
        self._refused: Unmendable | None = None
        self._turn = asyncio.Lock()

    async def name(self, sample: Sample) -> str:
        """See TeacherModel."""
        return await self.find()

    async def find(self) -> str:
        """The model. Raises what looking for it raises."""
        async with self._turn:
            if self._refused is not None:
                raise self._refused
            if self._name is None:
                try:
                    self._name = await self._find()
                except Unmendable as error:
                    self._refused = error
                    raise
            return self._name

    async def unknown(self, name: str) -> None:
        """See TeacherModel."""
        self._name = None


class SamplersModel:
    """The very weights that sampled the answer: what they say once they have read the hint.

    Args:
        served: names of the models that the server has now.
    """

    def __init__(self, served: Callable[[], Awaitable[list[str]]]) -> None:
        self._served = served

    async def name(self, sample: Sample) -> str:
        """See TeacherModel. Of several versions that sampled an answer, the last."""
        if not sample.policy_spans:
            raise TeacherRefused(NOT_SERVED, "the answer does not say which model sampled it")
        return sample.policy_spans[-1].policy

    async def unknown(self, name: str) -> None:
        """A version that gave way to a newer one is not served again; of a policy that is not served at all yet (a
        server that has just started) the versions are waited for."""
        try:
            policy, version = parse_policy_name(name)
            served = [parse_policy_name(each) for each in await self._served() if "@v" in each]
        except ValueError as error:
            raise TeacherRefused(NOT_SERVED, f"the model that sampled the answer is not served: {error}") from error
        newer = [other for known, other in served if known == policy and other > version]
        if newer:
            now = f"there is v{max(newer)}"
            raise TeacherRefused(NOT_SERVED, f"{name}, which sampled the answer, is not served any more: {now}")
