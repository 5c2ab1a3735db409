"""Computes a long prompt in chunks, so that running requests decode in between."""

import torch

from tentalis.inference.jobs import GenerateJob
from tentalis.inference.prefix_store import Prefix
from tentalis.inference.runtime import ModelRuntime


class LongPrompt:
    """The prompt of a waiting job, of which `done` first tokens are computed, in a cache of its own.

    `begun`: a prefix to go on from, with the number of its tokens that the prompt begins with.
    """

    def __init__(self, runtime: ModelRuntime, job: GenerateJob, begun: tuple[Prefix, int] | None) -> None:
        self.job = job
        self.done = 0
        self._runtime = runtime
        self._cache = runtime.new_cache()
        self._cache.resize(1, len(job.prompt), 0)
        if begun is not None:
            prefix, self.done = begun
            self._cache.load_row(0, prefix.keys, prefix.values, self.done)

    @property
    def remaining(self) -> int:
        """Number of tokens that are not computed yet."""
        return len(self.job.prompt) - self.done

    def compute(self, count: int) -> None:
        """Computes the next `count` tokens. Changes the route of the runtime."""
        device = self._runtime.device
        chunk = torch.tensor([self.job.prompt[self.done : self.done + count]], device=device)
        self._runtime.route([self.job.adapter])
        step = self._runtime.continue_step(self._cache, torch.tensor([self.done], device=device), chunk.shape[1])
        self._runtime.hidden(chunk, step)
        self.done += chunk.shape[1]

    def prefix(self) -> Prefix:
        """Returns what is computed."""
        keys, values = self._cache.keys[:, 0, :, : self.done], self._cache.values[:, 0, :, : self.done]
        return Prefix.of(self.job.adapter, self.job.prompt[: self.done], keys, values)
