"""The real answers of the served versions, from the newest rollouts on the log."""

from collections import defaultdict, deque

from schemas import topics
from schemas.records import Rollout
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import Follower
from tentalis.kafka.offsets import end_offsets
from tentalis.policies.guard import GuardEvidence
from tentalis.service.settings import Settings

# Rollouts per version that are kept as evidence, and records per partition that are read at the start.
MAX_ANSWERS, SEARCHED_RECORDS = 64, 64


class ServedAnswers:
    """Length and reward of each version's last answers. Pure."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[tuple[int, float | None]]] = defaultdict(lambda: deque(maxlen=MAX_ANSWERS))

    def apply(self, rollout: Rollout) -> None:
        """Applies a rollout; ignores one that several versions sampled, and a redacted one."""
        names = {span.policy for span in rollout.policy_spans}
        if len(names) == 1 and not rollout.forgotten:
            self._answers[names.pop()].append((sum(rollout.loss_mask), rollout.reward))

    def evidence(self, name: str) -> GuardEvidence:
        """The evidence on `policy@vN`."""
        answers = self._answers.get(name, ())
        rewards = [reward for _, reward in answers if reward is not None]
        return GuardEvidence(
            answers=len(answers),
            length=sum(length for length, _ in answers) / len(answers) if answers else 0.0,
            score=sum(rewards) / len(rewards) if rewards else None,
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
