"""Chooses the prompts of a run by their solve rates. Pure: a fold over asked and closed groups, without a clock.

A prompt whose samples are all right or all wrong gives a group without an advantage. The curriculum probes prompts that
were never asked, prefers those whose solve rate is between two bounds, and comes back to the others rarely, because the
policy changes. A prompt rests while its last group is open, and for about a batch of tasks.

The state is a function of the set of groups: the order in which they are read changes nothing. The draw of a task is
seeded with its number. So a manager that starts again chooses as the one before it would have.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tentalis.agents.scenarios.base import seeded

VERSION = "solve-rate/1"

# Metadata keys of a task: the number of its prompt, the rule that chose it, the prompt's pool and solve rate then.
PROMPT = "prompt"
RULE = "curriculum"
POOL = "pool"
SOLVE_RATE = "solve_rate"

GROUPS = 2
"""Number of a prompt's last groups whose samples make its solve rate. Older groups are of older policies."""


class BadCurriculum(ValueError):
    """Settings of a curriculum that contradict each other; the message says which."""


class Pool(StrEnum):
    """The standing of a prompt. All but `UNSEEN` and `LEARNABLE` are set aside."""

    UNSEEN = "unseen"
    """Never asked."""
    LEARNABLE = "learnable"
    """Its solve rate is between the bounds, and a recent group has different rewards."""
    EASY = "easy"
    """Its solve rate is above the upper bound."""
    HARD = "hard"
    """Its solve rate is below the lower bound."""
    EQUAL = "equal"
    """Its solve rate is between the bounds, but the rewards within each of its recent groups are equal."""
    UNSCORED = "unscored"
    """Asked, and no sample has a reward yet."""


_ASIDE = (Pool.EASY, Pool.HARD, Pool.EQUAL, Pool.UNSCORED)


@dataclass(frozen=True, slots=True)
class SolveRateRule:
    """The settings of a curriculum. Raises BadCurriculum.

    Attributes:
        low: lowest solve rate of a learnable prompt, in [0, 1].
        high: highest solve rate of a learnable prompt, in [low, 1].
        probe: share of the tasks that ask a prompt never asked before, while there is one.
        revisit: share of the tasks that ask a prompt that is set aside, while there is one.
        lowest: the reward that is not solved at all, in [-1, 1); 1 is solved, and those between are solved in part.
    """

    low: float = 0.1
    high: float = 0.9
    probe: float = 0.25
    revisit: float = 0.05
    lowest: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise BadCurriculum(f"solve rates from {self.low} to {self.high}: need 0 <= low <= high <= 1")
        if self.probe < 0.0 or self.revisit < 0.0 or not self.probe + self.revisit <= 1.0:
            raise BadCurriculum(
                f"the shares probe {self.probe} and revisit {self.revisit}: need both from 0, and a sum of at most 1"
            )
        if not -1.0 <= self.lowest < 1.0:
            raise BadCurriculum(f"the lowest reward {self.lowest}: need one from -1 to less than 1")

    def solved(self, reward: float) -> float:
        """Returns the part in [0, 1] that an answer with this reward is solved."""
        return min(1.0, max(0.0, (reward - self.lowest) / (1.0 - self.lowest)))

    def __str__(self) -> str:
        shares = f"probe={self.probe} revisit={self.revisit}"
        return f"{VERSION} low={self.low} high={self.high} {shares} lowest={self.lowest}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The prompt of the next task: its number in [0, count), its pool, and its solve rate in [0, 1] if it has one."""

    prompt: int
    pool: Pool
    solve_rate: float | None

    def metadata(self, rule: SolveRateRule) -> Mapping[str, str]:
        """Returns the metadata of the task, which explain the choice."""
        rate = {} if self.solve_rate is None else {SOLVE_RATE: f"{self.solve_rate:.4f}"}
        return {PROMPT: str(self.prompt), RULE: str(rule), POOL: self.pool.value, **rate}


@dataclass(frozen=True, slots=True, order=True)
class _Group:
    """A closed group with rewards. `index`: of its task; `solved`: sum of what its samples are solved."""

    index: int
    solved: float
    count: int
    equal: bool


@dataclass(slots=True)
class _Prompt:
    """A prompt that was asked. `last`: number of the last task that asked it; `open`: groups that are not closed."""

    last: int
    open: int = 0
    groups: list[_Group] = field(default_factory=list)

    @property
    def solve_rate(self) -> float | None:
        count = sum(group.count for group in self.groups)
        return sum(group.solved for group in self.groups) / count if count else None

    def pool(self, rule: SolveRateRule) -> Pool:
        rate = self.solve_rate
        if rate is None:
            return Pool.UNSCORED
        if rate < rule.low:
            return Pool.HARD
        if rate > rule.high:
            return Pool.EASY
        return Pool.EQUAL if all(group.equal for group in self.groups) else Pool.LEARNABLE


class Curriculum:
    """The solve rates of a run's prompts, and the choice of the next one.

    Args:
        run_id: seeds the draws.
        count: number of prompts, from 1. Raises BadCurriculum.
        rule: the settings.
    """

    def __init__(self, run_id: str, count: int, rule: SolveRateRule) -> None:
        if count < 1:
            raise BadCurriculum("a curriculum needs at least one prompt to train on")
        self.count = count
        self.rule = rule
        self._run_id = run_id
        self._prompts: dict[int, _Prompt] = {}
        self._unseen = 0
        # For each pool its prompts without an open group as (number of the last task, prompt). Entries that hold no
        # longer are dropped when they come to the top.
        self._waiting: dict[Pool, list[tuple[int, int]]] = {pool: [] for pool in Pool}

    def asked(self, prompt: int, index: int) -> None:
        """Applies that task number `index` asks a prompt. Tasks come in the order of their numbers."""
        known = self._prompts.setdefault(prompt, _Prompt(index))
        known.last = index
        known.open += 1
        while self._unseen in self._prompts:
            self._unseen += 1

    def closed(self, prompt: int, index: int, rewards: Sequence[float], *, equal: bool) -> None:
        """Applies that all samples of task `index` are decided, once for each task, after `asked`.

        Args:
            prompt: its prompt.
            index: its number.
            rewards: of its samples that have one.
            equal: the rewards are those of a group, and all the same.
        """
        known = self._prompts[prompt]
        known.open -= 1
        if rewards:
            solved = sum(self.rule.solved(reward) for reward in rewards)
            known.groups = sorted([*known.groups, _Group(index, solved, len(rewards), equal)])[-GROUPS:]
        if not known.open:
            heapq.heappush(self._waiting[known.pool(self.rule)], (known.last, prompt))

    def choose(self, index: int, rest: int) -> Choice:
        """Returns the prompt of task number `index`. `rest`: number of tasks between two that ask the same prompt.

        The rest is shortened if no prompt has had it. If every prompt has an open group, the prompts are asked in turn.
        """
        order = self._order(seeded("curriculum", self._run_id, index).random())
        for last in (index - rest, index):
            for pools in order:
                prompt = self._first(pools, last)
                if prompt is not None:
                    return self._choice(prompt)
        return self._choice(index % self.count)

    def pools(self) -> Mapping[Pool, int]:
        """Returns the number of prompts in each pool."""
        found = Counter(prompt.pool(self.rule) for prompt in self._prompts.values())
        return {pool: found[pool] for pool in Pool} | {Pool.UNSEEN: self.count - len(self._prompts)}

    def _order(self, draw: float) -> Sequence[Sequence[Pool]]:
        """Returns the pools in the order in which a task with this draw in [0, 1) asks them for a prompt."""
        aside, learnable, unseen = _ASIDE, (Pool.LEARNABLE,), (Pool.UNSEEN,)
        if draw < self.rule.revisit:
            return aside, learnable, unseen
        if draw < self.rule.revisit + self.rule.probe:
            return unseen, learnable, aside
        return learnable, unseen, aside

    def _first(self, pools: Sequence[Pool], last: int) -> int | None:
        """Returns the prompt of the pools that was asked the longest ago, at the latest by task `last`."""
        if pools == (Pool.UNSEEN,):
            return self._unseen if self._unseen < self.count else None
        found = min((top for pool in pools if (top := self._top(pool)) is not None), default=None)
        return found[1] if found is not None and found[0] <= last else None

    def _top(self, pool: Pool) -> tuple[int, int] | None:
        waiting = self._waiting[pool]
        while waiting:
            last, prompt = waiting[0]
            known = self._prompts[prompt]
            if known.last == last and not known.open and known.pool(self.rule) is pool:
                return waiting[0]
            heapq.heappop(waiting)
        return None

    def _choice(self, prompt: int) -> Choice:
        known = self._prompts.get(prompt)
        if known is None:
            return Choice(prompt, Pool.UNSEEN, None)
        return Choice(prompt, known.pool(self.rule), known.solve_rate)
