"""AdamW's moments under ZeRO 1, where each rank holds a part of every group, flattened: gathered whole, and set again.

DeepSpeed shards and steps. A checkpoint has the moments by parameter, as without ZeRO, so a run may change `zero_stage`
and the number of its ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

MOMENTS = ("exp_avg", "exp_avg_sq")


def gather_moments(
    parameters: Sequence[tuple[str, Parameter]], optimizer: Any, state: Mapping[Any, Mapping[str, Tensor]], keep: bool
) -> dict[str, Tensor]:
    """Returns copies of all moments on the CPU by parameter, or nothing unless `keep`. `optimizer`: DeepSpeed's;
    `state`: that of AdamW, by flat part. A collective."""
    gathered = {}
    for name, parameter in parameters:
        for moment in MOMENTS:
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            for flat, here, there in _fragment(parameter, optimizer):
                whole[here] = state[flat][moment][there]
            # All other ranks have zeros at the places of this one's part.
            dist.all_reduce(whole)
            if keep:
                gathered[f"{name}.{moment}"] = whole.reshape(parameter.shape).to("cpu", copy=True)
    return gathered


def set_moments(
    parameters: Sequence[tuple[str, Parameter]],
    optimizer: Any,
    state: dict[Any, dict[str, Tensor]],
    moments: Mapping[str, Tensor],
    steps: int,
) -> None:
    """Sets this rank's parts of the moments."""
    state.clear()
    if not steps:
        return
    for flat in optimizer.single_partition_of_fp32_groups:
        state[flat] = {"step": torch.tensor(float(steps)), **{moment: torch.zeros_like(flat) for moment in MOMENTS}}
    for name, parameter in parameters:
        for flat, here, there in _fragment(parameter, optimizer):
            for moment in MOMENTS:
                state[flat][moment][there] = moments[f"{name}.{moment}"].flatten()[here].to(flat.device)


def _fragment(parameter: Any, optimizer: Any) -> Iterable[tuple[Tensor, slice, slice]]:
    """Returns this rank's part of a parameter, if it has one: the flat part of its group, and the places in the
    flattened parameter and in the flat part."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return []
    flat = optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return [(flat, slice(here.start, here.start + here.numel), slice(there.start, there.start + there.numel))]
