"""What a policy's trainer is to the broker: one consumer group, one transactional id, one process at a time."""


class Fenced(RuntimeError):
    """Another trainer of the policy has taken over."""

    def __init__(self, policy: str) -> None:
        super().__init__(
            f"another trainer of the policy {policy} has taken over; this one writes nothing more. One policy has one "
            "trainer at a time"
        )


def group_of(policy: str) -> str:
    """The consumer group that trains a policy, and the transactional id of what it writes."""
    return f"tentalis-trainer-{policy}"


def member_of(rank: int) -> str:
    """The static member of that group that a rank is, whichever run it trains: a successor takes its place at once, and
    the one before is told so."""
    return f"rank{rank}"
