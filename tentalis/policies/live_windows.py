"""The windows over a served version's newest answers and scored tasks. Pure.

A window drops the oldest entry of the user who has most entries, so that nobody pushes out the others' by asking much.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.records import TaskHead

# Answers per version that are kept as evidence.
MAX_ANSWERS = 64
# Scored tasks per version that are kept for a pair with a task of another version.
PAIRED_TASKS = 64
_KEY_NAMESPACE = "*"


def owner_of(head: TaskHead) -> str | None:
    """The user or key that asked a task; None for a task of a run, which the operator's own manager issues. "" stands
    for all who name no user: callers of a gateway without keys, and tasks of keys that act for no user."""
    if head.run_id is not None:
        return None
    if head.user_id:
        return f"user {head.user_id}"
    namespace = (head.session_id or "").partition("/")[0]
    return f"key {namespace.removeprefix(_KEY_NAMESPACE)}" if namespace.startswith(_KEY_NAMESPACE) else ""


@dataclass(frozen=True, slots=True)
class LiveAnswer:
    """An answer. `prompt`: a hash of the tokens before it. `tokens`: its first tokens. `length`: tokens per turn."""

    prompt: str
    tokens: tuple[int, ...]
    length: float
    reward: float | None


class AnswerWindow:
    """A version's last answers, MAX_ANSWERS at most."""

    def __init__(self) -> None:
        self._by_owner: dict[str | None, deque[LiveAnswer]] = {}

    def add(self, owner: str | None, answer: LiveAnswer) -> None:
        """Adds an answer."""
        self._by_owner.setdefault(owner, deque()).append(answer)
        if sum(map(len, self._by_owner.values())) > MAX_ANSWERS:
            most = max(self._by_owner, key=lambda each: len(self._by_owner[each]))
            self._by_owner[most].popleft()

    def answers(self, without: str | None = None) -> list[LiveAnswer]:
        """The answers. `without`: a user whose answers are left out."""
        return [each for owner, own in self._by_owner.items() if without is None or owner != without for each in own]

    @property
    def owners(self) -> set[str | None]:
        """The owners of the answers."""
        return {owner for owner, own in self._by_owner.items() if own}


@dataclass(slots=True)
class _ScoredTask:
    owner: str | None
    number: int
    rewards: list[float] = field(default_factory=list)


class ScoredTasks:
    """The last tasks of a version that have a reward, PAIRED_TASKS at most, numbered in the order of their first ones.
    The samples of one task are no independent answers: its score is their mean reward."""

    def __init__(self) -> None:
        self._tasks: dict[str, _ScoredTask] = {}
        self._next_number = 0

    def add(self, task_id: str, owner: str | None, reward: float) -> None:
        """Adds the reward of a sample."""
        if task_id not in self._tasks:
            self._tasks[task_id] = _ScoredTask(owner, self._next_number)
            self._next_number += 1
        self._tasks[task_id].rewards.append(reward)
        if len(self._tasks) > PAIRED_TASKS:
            owners = [task.owner for task in self._tasks.values()]
            most = max(owners, key=owners.count)
            del self._tasks[next(id_ for id_, task in self._tasks.items() if task.owner == most)]

    def since(self, number: int, without: str | None = None) -> Iterator[tuple[int, float]]:
        """The numbers and scores of the tasks from a number on, in order. `without`: a user whose tasks are left
        out."""
        for task in self._tasks.values():
            if task.number >= number and (without is None or task.owner != without):
                yield task.number, sum(task.rewards) / len(task.rewards)

    @property
    def owners(self) -> set[str | None]:
        """The owners of the tasks."""
        return {task.owner for task in self._tasks.values()}
