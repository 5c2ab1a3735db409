"""The columns of the view, and a rollout as a row. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.ids import parse_policy_name
from schemas.records import Rollout
from schemas.tensors import uint8_view


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its SQL type, the type of the numpy column that it is made from, and its description."""

    type: str
    numpy: str
    doc: str


TEXT, NUMBER, INTEGER, YES = ("VARCHAR", "O"), ("DOUBLE", "f8"), ("BIGINT", "f8"), ("BOOLEAN", "?")

COLUMNS: Mapping[str, Column] = {
    "rollout_id": Column(*TEXT, "Its key on the topic: task_id/sample_index[/part]."),
    "time": Column("TIMESTAMP", "i8", "Append time on the log, UTC."),
    "policy": Column(*TEXT, "The policy that the rollout can train."),
    "version": Column(*INTEGER, "The last version of the policy that sampled a part of it; null: none."),
    "environment": Column(*TEXT, "chat, math, ..."),
    "run_id": Column(*TEXT, "The run that asked for the task."),
    "task_id": Column(*TEXT, "The task, which is shared by the samples of a group."),
    "sample_index": Column(*INTEGER, "Index of the sample in its group."),
    "session_id": Column(*TEXT, "The conversation."),
    "turn_index": Column(*INTEGER, "Index of the turn in the conversation."),
    "user_id": Column(*TEXT, "The opaque id of the user."),
    "worker_id": Column(*TEXT, "The worker that answered."),
    "reward": Column(*NUMBER, "In [-1, 1]; null: unknown."),
    "components": Column(*TEXT, "JSON: the reward's parts by name."),
    "group_mean": Column(*NUMBER, "Mean reward of the group's samples that closed."),
    "group_std": Column(*NUMBER, "Standard deviation of these rewards."),
    "n_requested": Column(*INTEGER, "Number of requested samples of the group."),
    "n_closed": Column(*INTEGER, "Number of samples that closed."),
    "has_rl": Column(*YES, "True if it has a reward to train on."),
    "has_opd": Column(*YES, "True if it has a teacher's log-probs to train on."),
    "hint": Column(*TEXT, "The first hint."),
    "teacher_policy": Column(*TEXT, "The policy of the teacher."),
    "temperature": Column(*NUMBER, "Sampling temperature."),
    "tokens": Column(*INTEGER, "Number of tokens of prompt and response."),
    "trained_tokens": Column(*INTEGER, "Number of tokens in the loss mask."),
    "digest": Column(*TEXT, "sha256 of the fields that training reads."),
    "partition": Column("INTEGER", "i4", "Partition of the record."),
    "offset": Column("BIGINT", "i8", "Offset of the record."),
}


def row_of(rollout: Rollout, partition: int, offset: int, timestamp: int) -> tuple[Any, ...]:
    """Returns the values of COLUMNS. timestamp: milliseconds."""
    head = rollout.head
    return (
        rollout.rollout_id,
        timestamp,
        head.policy,
        parse_policy_name(rollout.policy_version)[1] if "@v" in rollout.policy_version else None,
        head.environment,
        head.run_id,
        head.task_id,
        rollout.sample_index,
        head.session_id,
        head.turn_index,
        head.user_id,
        rollout.worker_id,
        rollout.reward,
        json.dumps(rollout.components, sort_keys=True),
        rollout.group_mean,
        rollout.group_std,
        rollout.n_requested,
        rollout.n_closed,
        rollout.has_rl,
        rollout.has_opd,
        rollout.hints[0] if rollout.hints else None,
        rollout.teacher_policy,
        rollout.sampling.temperature,
        rollout.n_tokens,
        int(uint8_view(rollout.loss_mask).sum()),
        rollout.digest,
        partition,
        offset,
    )


def columns_of(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Returns the rows as numpy columns; null is None in text and NaN in numbers."""
    made = {}
    for (name, column), values in zip(COLUMNS.items(), zip(*rows, strict=True), strict=True):
        plain = [np.nan if value is None else value for value in values] if column.numpy == "f8" else values
        made[name] = np.array(plain, dtype=column.numpy)
    return made


def selection() -> str:
    """Returns the SQL expressions that convert the numpy columns to their SQL types."""
    parts = []
    for name, column in COLUMNS.items():
        value = f'make_timestamp("{name}" * 1000)' if column.type == "TIMESTAMP" else f'CAST("{name}" AS {column.type})'
        parts.append(f'{value} AS "{name}"')
    return ", ".join(parts)
