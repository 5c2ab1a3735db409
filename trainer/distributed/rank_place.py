"""The number of a rank and the address of its group, from the variables of whoever starts it.

The trainer's launcher sets them (launch.py), as do torchrun and the schedulers of clusters. Whoever starts the ranks
ends all when one ends, and starts all again.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tentalis.service.variable import BadVariable, Variable, matching, whole

_RANKS = "the ranks of a trainer"
RANK = Variable[int | None]("RANK", whole(0), None, "Number of this rank, from 0.", _RANKS)
WORLD_SIZE = Variable[int | None]("WORLD_SIZE", whole(1), None, "Number of ranks.", _RANKS)
MASTER_ADDR = Variable("MASTER_ADDR", matching(r"\S+", "a host"), "", "The host of the ranks' store.", _RANKS)
MASTER_PORT = Variable("MASTER_PORT", whole(1, 65535), 0, "The port of the ranks' store.", _RANKS)
LOCAL_RANK = Variable[int | None]("LOCAL_RANK", whole(0), None, "Number of this rank on its machine.", _RANKS)
LOCAL_WORLD_SIZE = Variable[int | None]("LOCAL_WORLD_SIZE", whole(1), None, "Number of ranks here.", _RANKS)
STORE_IS_SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: True if the process that starts the ranks also serves their store."""
BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""torchrun's variable: the name of its run."""
RESTARTS = Variable("TORCHELASTIC_RESTART_COUNT", whole(0), 0, "Number of restarts of all ranks.", _RANKS)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `rank` of `size`, whose group meets on the store at `host` and `port`, "" and 0 for a single rank.

    Attributes:
        given: the variables name a rank, so another process has started this one as such.
        store_is_served: that process serves the store; otherwise rank 0 does.
        restarts: how often all ranks were started again with the same store.
        local_rank: number of the rank on its machine; it uses this GPU.
        local_size: number of ranks on its machine; they share its cores.
    """

    rank: int
    size: int
    host: str = ""
    port: int = 0
    given: bool = False
    store_is_served: bool = False
    restarts: int = 0
    local_rank: int = 0
    local_size: int = 1


def rank_place(variables: Mapping[str, str] = os.environ) -> RankPlace:
    """Returns the place that the variables describe; rank 0 of 1 without them. A rank is alone on its machine if they
    do not number it there. Raises BadVariable if they are incomplete or contradict each other."""
    rank, size = RANK.read(variables), WORLD_SIZE.read(variables)
    if rank is not None and size is None:
        raise BadVariable(
            f"RANK={rank} is set, but WORLD_SIZE is not: set WORLD_SIZE to the number of ranks, or unset RANK to train "
            "in one process"
        )
    given, size = size is not None, size or 1
    if rank is None and size > 1:
        raise BadVariable(
            f"WORLD_SIZE={size} is set, but RANK is not: give each process its number in RANK, from 0 to {size - 1}, "
            "or unset WORLD_SIZE to train in one process"
        )
    rank = rank or 0
    if rank >= size:
        raise BadVariable(f"RANK={rank}: with WORLD_SIZE={size}, give 0 to {size - 1}")
    local_rank, local_size = _local_place(variables, size)
    if size == 1:
        return RankPlace(rank, size, given=given, local_rank=local_rank)
    host, port = MASTER_ADDR.read(variables), MASTER_PORT.read(variables)
    if not host or not port:
        name, what = ("MASTER_PORT", "a free port") if host else ("MASTER_ADDR", "the address")
        raise BadVariable(
            f"WORLD_SIZE={size} is set, but {name} is not: set it to {what} of rank 0, the same everywhere"
        )
    served = variables.get(STORE_IS_SERVED) == "True"
    return RankPlace(rank, size, host, port, given, served, RESTARTS.read(variables), local_rank, local_size)


def _local_place(variables: Mapping[str, str], size: int) -> tuple[int, int]:
    """Returns the number of the rank on its machine, and the number of ranks there."""
    rank, here = LOCAL_RANK.read(variables), LOCAL_WORLD_SIZE.read(variables)
    if here is not None and here > size:
        raise BadVariable(
            f"LOCAL_WORLD_SIZE={here}: it counts the ranks on this machine, and WORLD_SIZE={size} all ranks"
        )
    if size == 1 or (rank is None and here is None):
        return rank or 0, 1
    if here is None:
        raise BadVariable(
            f"LOCAL_RANK={rank} is set, but LOCAL_WORLD_SIZE is not: set it to the number of ranks on this machine"
        )
    if rank is None:
        raise BadVariable(
            f"LOCAL_WORLD_SIZE={here} is set, but LOCAL_RANK is not: give each process on this machine its number, "
            f"from 0 to {here - 1}"
        )
    if rank >= here:
        raise BadVariable(f"LOCAL_RANK={rank}: with LOCAL_WORLD_SIZE={here}, give 0 to {here - 1}")
    if here < size and variables.get(BY_TORCHRUN):
        raise BadVariable(
            f"WORLD_SIZE={size} is set, and LOCAL_WORLD_SIZE={here} by torchrun: over several machines it starts the "
            "ranks of one again without the others. Run torchrun on one machine, or `tentalis train --nodes` on each"
        )
    return rank, here
