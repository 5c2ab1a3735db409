"""The identity of a policy's trainer on the broker: one consumer group, one transactional id, one process at a time."""

from tentalis.kafka import topology


class TrainerFenced(RuntimeError):
    """Another trainer of the policy has taken over."""

    def __init__(self, policy: str) -> None:
        super().__init__(
            f"another trainer of the policy {policy} has taken over; this one stops writing. A policy has one "
            "trainer at a time"
        )


def consumer_group(policy: str) -> str:
    """Returns the consumer group of a policy's trainer, which is also its transactional id."""
    return topology.named("trainer").consumer_group(policy=policy)


def member_id(rank: int) -> str:
    """Returns a rank's static member id in that group, the same for every run: a successor takes its place immediately,
    and the predecessor is fenced."""
    return f"rank{rank}"
