"""The curriculum of a run of `tentalis learn`: its arguments for the manager, and where its prompts stand. Pure."""

from collections.abc import Iterable, Mapping

from schemas.records import Record
from tentalis.agents.manager.core import ManagerState
from tentalis.agents.manager.curriculum import Curriculum, Pool, SolveRateRule


def curriculum_arguments(rule: SolveRateRule | None) -> tuple[str, ...]:
    """Returns the arguments of `tentalis manager` for a curriculum; none without one."""
    if rule is None:
        return ()
    settings = {
        "--hard-below": rule.low,
        "--easy-above": rule.high,
        "--probe": rule.probe,
        "--revisit": rule.revisit,
        "--lowest-reward": rule.lowest,
    }
    return "--curriculum", "solve-rate", *(word for name, value in settings.items() for word in (name, str(value)))


def pools_of(run_id: str, prompts: int, rule: SolveRateRule, records: Iterable[Record]) -> Mapping[Pool, int]:
    """Returns the number of a run's prompts in each pool, as its manager has it after the same tasks and outcomes.

    Args:
        prompts: number of prompts that are trained on.
        records: of the topics of tasks and outcomes, in any order; those of other runs are passed over.
    """
    curriculum = Curriculum(run_id, prompts, rule)
    state = ManagerState(run_id, owes_feedback=False, curriculum=curriculum)
    for record in records:
        state.apply(record)
    return curriculum.pools()


def pools_in_words(pools: Mapping[Pool, int]) -> str:
    """Returns the pools that have prompts, in words: `12 unseen, 5 learnable, 1 easy`."""
    return ", ".join(f"{count} {pool.value}" for pool, count in pools.items() if count)
