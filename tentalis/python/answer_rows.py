"""The answers of a run as rows, made of its results and outcomes. Pure."""

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from schemas import topics
from schemas.records import Outcome, OutcomeKind, Record, Result

TOPICS = (topics.RESULTS, topics.OUTCOMES)
_OWN_KEY_KINDS = (OutcomeKind.LATE, OutcomeKind.SUPERSEDED)


def answer_rows(run_id: str, records: Iterable[Record]) -> list[dict[str, Any]]:
    """Returns one row for each answer of a run, in the order of its tasks: prompt, completion, reward with its parts,
    the policy that sampled, and the other columns of the prompt."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    outcomes: dict[tuple[str, int], Outcome] = {}
    for record in records:
        if isinstance(record, Result) and record.task.run_id == run_id:
            rows.setdefault((record.task.task_id, record.sample_index), _answered(record))
        elif isinstance(record, Outcome) and record.head.run_id == run_id and record.kind not in _OWN_KEY_KINDS:
            outcomes.setdefault((record.head.task_id, record.sample_index), record)
    place = {task_id: number for number, task_id in enumerate(dict.fromkeys(task_id for task_id, _ in rows))}
    ordered = sorted(rows, key=lambda key: (place[key[0]], key[1]))
    return [rows[key] | _judged(outcomes.get(key)) for key in ordered]


def _answered(result: Result) -> dict[str, Any]:
    verifier = result.task.verifier
    return {
        "prompt": [{"role": message.role, "content": message.content} for message in result.task.messages],
        "completion": result.text,
        "task_id": result.task.task_id,
        "sample_index": result.sample_index,
        "columns": {} if verifier is None else _columns(from_json(verifier.data)),
    }


def _columns(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the other columns of a row: what a function got, or the data of an environment."""
    columns = data.get("columns")
    return columns if isinstance(columns, dict) and len(data) == 1 else data


def _judged(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {"reward": None, "components": {}, "policy": None}
    spans = outcome.policy_spans
    return {
        "reward": outcome.reward,
        "components": dict(outcome.components),
        "policy": spans[-1].policy if spans else None,
    }
