"""Which tasks a scorer that judges by feedback can be named in."""

from schemas.records import Source, Task
from tentalis.rewards.verdict import BadVerifierData


def answers_to(task: Task, sources: frozenset[Source], name: str) -> None:
    """Raises BadVerifierData unless the task's reward answers to one of the sources."""
    if task.terms.rl is not None and task.terms.rl not in sources:
        known = ", ".join(sorted(source.value for source in sources))
        raise BadVerifierData(
            f"{name} judges by feedback ({known}), but the reward of the task answers to {task.terms.rl.value!r}: "
            "name one of these in terms.rl, or another verifier"
        )
