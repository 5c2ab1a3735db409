"""What the served versions really answer, from the newest rollouts on the log."""

from collections import defaultdict, deque

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import Rollout
from tentalis.config import Settings
from tentalis.guard import Evidence
from tentalis.kafka import Follower, end_offsets

# Rollouts per version that the evidence is drawn from, and records per partition that are read when it begins.
KEPT, LOOKED_AT = 64, 64


class Answers:
    """Length and reward of the last answers of every version. Pure."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[int, float | None]]] = defaultdict(lambda: deque(maxlen=KEPT))

    def apply(self, rollout: Rollout) -> None:
        """Takes in a rollout; one that several versions sampled, or that was forgotten, says nothing of any."""
        names = {span.policy for span in rollout.policy_spans}
        if len(names) == 1 and not rollout.forgotten:
            self._seen[names.pop()].append((sum(rollout.loss_mask), rollout.reward))

    def evidence(self, name: str) -> Evidence:
        """Of `policy@vN`."""
        seen = self._seen.get(name, ())
        rewards = [reward for _, reward in seen if reward is not None]
        return Evidence(
            answers=len(seen),
            length=sum(length for length, _ in seen) / len(seen) if seen else 0.0,
            score=sum(rewards) / len(rewards) if rewards else None,
        )


class Live:
    """Follows the rollout topic from its last records on."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        start = {p: max(0, end - LOOKED_AT) for p, end in end_offsets(settings, topics.ROLLOUTS).items()}
        self._follower = Follower(settings, topics.ROLLOUTS, start)
        self._codec = codec
        self.answers = Answers()

    def poll(self) -> None:
        """Takes in what is new."""
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
        """Leaves."""
        self._follower.close()
