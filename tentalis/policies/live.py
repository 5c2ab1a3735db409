"""The real answers of the served versions, from the newest rollouts on the log."""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from schemas import topics
from schemas.ids import sha256_hex
from schemas.records import Rollout
from schemas.tensors import int32_view, uint8_view
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import Follower
from tentalis.kafka.offsets import end_offsets
from tentalis.policies.guard import GuardEvidence
from tentalis.policies.guard_statistics import DropTest, similarity_across
from tentalis.service.settings import Settings

# Rollouts per version that are kept as evidence, and records per partition that are read at the start.
MAX_ANSWERS, SEARCHED_RECORDS = 64, 64
# Scored tasks per version that are kept for a pair with a task of another version.
PAIRED_TASKS = 64
# Tokens of an answer that are compared with other answers.
COMPARED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class _LiveAnswer:
    """An answer. `prompt`: a hash of the tokens before it. `tokens`: its first tokens. `length`: tokens per turn."""

    prompt: str
    tokens: tuple[int, ...]
    length: float
    reward: float | None


class _ScoredTasks:
    """The last tasks of a version that have a reward, numbered from 0 in the order of their first ones. The samples of
    one task are no independent answers: its score is their mean reward."""

    def __init__(self) -> None:
        self.first = 0
        """The number of the oldest task that is kept."""
        self._rewards: dict[str, list[float]] = {}

    def add(self, task_id: str, reward: float) -> None:
        """Adds the reward of a sample."""
        self._rewards.setdefault(task_id, []).append(reward)
        if len(self._rewards) > PAIRED_TASKS:
            del self._rewards[next(iter(self._rewards))]
            self.first += 1

    @property
    def end(self) -> int:
        """The number of the next task."""
        return self.first + len(self._rewards)

    def scores(self, start: int, count: int) -> list[float]:
        """The scores of tasks that are kept."""
        rewards = islice(self._rewards.values(), start - self.first, start - self.first + count)
        return [sum(each) / len(each) for each in rewards]


@dataclass(slots=True)
class _LiveTest:
    """The test of one version against another, and the numbers of their next tasks."""

    next_task: int = 0
    next_other: int = 0
    test: DropTest = field(default_factory=DropTest)


class ServedAnswers:
    """Each version's last answers, and the tests of their rewards. Pure."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[_LiveAnswer]] = defaultdict(lambda: deque(maxlen=MAX_ANSWERS))
        self._tasks: dict[str, _ScoredTasks] = defaultdict(_ScoredTasks)
        self._tests: dict[tuple[str, str], _LiveTest] = defaultdict(_LiveTest)

    def apply(self, rollout: Rollout) -> None:
        """Applies a rollout; ignores one that several versions sampled, and a redacted one."""
        names = {span.policy for span in rollout.policy_spans}
        if len(names) != 1 or rollout.forgotten:
            return
        name = names.pop()
        self._answers[name].append(_answer_in(rollout))
        if rollout.reward is not None:
            self._tasks[name].add(rollout.head.task_id, rollout.reward)

    def evidence(self, name: str) -> GuardEvidence:
        """The evidence on `policy@vN` in its last answers. It has no `scores`: see `evidence_of_drop`."""
        answers = self._answers.get(name, ())
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        said = [answer.tokens for answer in answers]
        return GuardEvidence(
            answers=len(answers),
            length=sum(answer.length for answer in answers) / len(answers) if answers else 0.0,
            score=sum(rewards) / len(rewards) if rewards else None,
            similarity=similarity_across([answer.prompt for answer in answers], said) if answers else None,
        )

    def evidence_of_drop(self, name: str, other: str) -> float:
        """The greatest e-value so far against "`name` scores no worse than `other`", both `policy@vN`.

        Each call pairs the tasks that came since the last one, in their order. A task is in one pair of these two
        versions, so the error rate of the test holds over all calls (guard_statistics.py). The oldest of more than
        PAIRED_TASKS tasks that wait for a pair are left out."""
        tasks, others, live = self._tasks[name], self._tasks[other], self._tests[name, other]
        start, other_start = max(live.next_task, tasks.first), max(live.next_other, others.first)
        count = min(tasks.end - start, others.end - other_start)
        for score, other_score in zip(tasks.scores(start, count), others.scores(other_start, count), strict=True):
            live.test.add(score, other_score)
        live.next_task, live.next_other = start + count, other_start + count
        return live.test.greatest


def _answer_in(rollout: Rollout) -> _LiveAnswer:
    tokens, mask = int32_view(rollout.token_ids), uint8_view(rollout.loss_mask)
    chosen = np.flatnonzero(mask)
    begin = int(chosen[0]) if len(chosen) else len(tokens)
    # The base model answered one turn: an episode's tokens of all turns are no length to compare with its.
    turns = 1 + int(np.count_nonzero(np.diff(chosen) > 1))
    return _LiveAnswer(
        prompt=sha256_hex(tokens[:begin].tobytes()),
        tokens=tuple(int(token) for token in tokens[chosen[:COMPARED_TOKENS]]),
        length=len(chosen) / turns,
        reward=rollout.reward,
    )


class LiveRollouts:
    """Follows the rollout topic, beginning with its last records."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        ends = end_offsets(settings, topics.ROLLOUTS)
        start = {(topics.ROLLOUTS, p): max(0, end - SEARCHED_RECORDS) for p, end in ends.items()}
        self._follower = Follower(settings, topics.ROLLOUTS, start=start)
        self._codec = codec
        self.answers = ServedAnswers()

    def poll(self) -> None:
        """Applies new rollouts."""
        while found := self._follower.poll(0.0):
            for stored in found:
                if stored.value is None:
                    continue
                try:
                    record = stored.decode(self._codec)
                except DecodeError:  # the trainer owns the dead letters of rollouts
                    continue
                if isinstance(record, Rollout):
                    self.answers.apply(record)

    def close(self) -> None:
        """Closes the consumer."""
        self._follower.close()
