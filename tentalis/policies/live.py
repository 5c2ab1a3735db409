"""The real answers of the served versions, from the newest rollouts on the log."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from schemas import topics
from schemas.ids import sha256_hex
from schemas.records import RecordedBy, Rollout
from schemas.tensors import int32_view, uint8_view
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import Follower
from tentalis.kafka.offsets import end_offsets
from tentalis.policies.guard import GuardEvidence
from tentalis.policies.guard_statistics import DropTest, similarity_across
from tentalis.policies.live_windows import AnswerWindow, LiveAnswer, ScoredTasks, owner_of
from tentalis.service.settings import Settings

# Records per partition that are read at the start.
SEARCHED_RECORDS = 64
# Tokens of an answer that are compared with other answers.
COMPARED_TOKENS = 128
# The processes that know from the model server which version sampled. Clients may post answers and name any version.
TRUSTED_RECORDERS = frozenset({RecordedBy.GATEWAY, RecordedBy.WORKER})


@dataclass(slots=True)
class _LiveTest:
    """The test of one version against another, and the numbers of their next tasks."""

    next_task: int = 0
    next_other: int = 0
    test: DropTest = field(default_factory=DropTest)


class ServedAnswers:
    """Each version's last answers, and the tests of their rewards. Pure.

    Only answers that a gateway or a worker recorded count. `without` in the methods leaves out the answers of a user;
    see `users`."""

    def __init__(self) -> None:
        self._answers: dict[str, AnswerWindow] = defaultdict(AnswerWindow)
        self._tasks: dict[str, ScoredTasks] = defaultdict(ScoredTasks)
        self._tests: dict[tuple[str, str, str | None], _LiveTest] = defaultdict(_LiveTest)
        # By policy; two suffice to know that nobody is alone.
        self._owners: dict[str, set[str | None]] = defaultdict(set)

    def apply(self, rollout: Rollout) -> None:
        """Applies a rollout; ignores one that several versions sampled, a redacted one, and one that a client posted or
        of which nothing says who recorded it."""
        names = {span.policy for span in rollout.policy_spans}
        if len(names) != 1 or rollout.forgotten or rollout.recorded_by not in TRUSTED_RECORDERS:
            return
        name, owner = names.pop(), owner_of(rollout.head)
        owners = self._owners[_policy_of(name)]
        if len(owners) < 2:
            owners.add(owner)
        self._answers[name].add(owner, _answer_in(rollout))
        if rollout.reward is not None:
            self._tasks[name].add(rollout.head.task_id, owner, rollout.reward)

    def users(self, name: str) -> list[str]:
        """The users and keys whose answers are evidence on `policy@vN`, and without any of whom a verdict on it must be
        the same; none if nobody else has asked the policy."""
        if len(self._owners[_policy_of(name)]) < 2:
            return []
        return sorted(owner for owner in self._answers[name].owners | self._tasks[name].owners if owner is not None)

    def evidence(self, name: str, *, without: str | None = None) -> GuardEvidence:
        """The evidence on `policy@vN` in its last answers. It has no `scores`: see `evidence_of_drop`."""
        answers = self._answers[name].answers(without)
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        said = [answer.tokens for answer in answers]
        return GuardEvidence(
            answers=len(answers),
            length=sum(answer.length for answer in answers) / len(answers) if answers else 0.0,
            score=sum(rewards) / len(rewards) if rewards else None,
            similarity=similarity_across([answer.prompt for answer in answers], said) if answers else None,
        )

    def evidence_of_drop(self, name: str, other: str, *, without: str | None = None) -> float:
        """The greatest e-value so far against "`name` scores no worse than `other`", both `policy@vN`.

        Each call pairs the tasks that came since the last one, in their order. A task is in one pair of these two
        versions, so the error rate of the test holds over all calls (guard_statistics.py). The oldest of more than
        PAIRED_TASKS tasks that wait for a pair are left out. Each user that is left out has a test of its own."""
        live = self._tests[name, other, without]
        tasks = self._tasks[name].since(live.next_task, without)
        others = self._tasks[other].since(live.next_other, without)
        for (number, score), (other_number, other_score) in zip(tasks, others, strict=False):
            live.test.add(score, other_score)
            live.next_task, live.next_other = number + 1, other_number + 1
        return live.test.greatest


def _policy_of(name: str) -> str:
    return name.rpartition("@")[0]


def _answer_in(rollout: Rollout) -> LiveAnswer:
    tokens, mask = int32_view(rollout.token_ids), uint8_view(rollout.loss_mask)
    chosen = np.flatnonzero(mask)
    begin = int(chosen[0]) if len(chosen) else len(tokens)
    # The base model answered one turn: an episode's tokens of all turns are no length to compare with its.
    turns = 1 + int(np.count_nonzero(np.diff(chosen) > 1))
    return LiveAnswer(
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
