"""The check that a task may name a scorer that judges by feedback."""

from schemas.records import Source, Task
from tentalis.rewards.verdict import BadVerifierData


def check_terms(task: Task, sources: frozenset[Source], name: str) -> None:
    """Raises BadVerifierData unless `terms.rl` of the task is one of the sources."""
    if task.terms.rl is not None and task.terms.rl not in sources:
        known = ", ".join(sorted(source.value for source in sources))
        raise BadVerifierData(
            f"{name} judges by feedback ({known}), but terms.rl of the task is {task.terms.rl.value!r}: "
            "set terms.rl to one of these sources, or name another verifier"
        )
