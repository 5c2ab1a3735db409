"""The join written with Quix Streams 3.28: `python -m tests.bench.join_quix BOOTSTRAP GROUP STATE_DIR`.

Runs in a separate environment, and imports only the schemas and the derived ids from this project. Optimisations:

- Raw bytes in and out ((de)serializers that do nothing), decoded by fastavro into plain dicts, without pydantic and
  validation.
- State through the documented API, `apply(stateful=True)`, and only as bytes (`set_bytes`, `get_bytes`), so that no
  value goes through JSON. A task has one value and its payload one per half, as in our join; no TTL (it stamps every
  value).
- A timeout needs the state of one task at the record of another, and Quix has no timers: the key deserializer gives all
  records of a partition the same key, and so the same state. The heap of due times is in memory and is not persisted.
- The default checkpoint: output is sent at once, state and offsets are flushed every COMMIT_S seconds; default settings
  of RocksDB and changelog. Idempotent producer, acks=all, compression as in ours: zstd at level 1 (librdkafka's default
  of 3 costs 1.5 times as much). A record lingers for librdkafka's default of 5 ms; in ours for 1 ms.
- One application, no web, logging off, one process.

It has the guarantees of ours (at least once, state per task in its store and its changelog) and does the same for the
records of the benchmark: slots bound to a result, duplicates detected by event id, timeouts by stream time, outcomes
and rollouts with the same ids and digests. It rejects no records, has no superseded or late halves and no Forget, and
does not recognise a redelivered record after the state of its task has advanced.
"""

import hashlib
import heapq
import io
import logging
import math
import struct
import sys
from typing import Any

import fastavro
from quixstreams import Application, message_context
from quixstreams.kafka.configuration import ConnectionConfig
from quixstreams.models.serializers import Deserializer, Serializer

from schemas.ids import derived_id
from schemas.wire import avro
from tests.bench.join_quix_state import ENTRY_BYTES, HALVES, HEAD, MARKER_TTL_MS, PREFIX, entry_of

COMMIT_S = 1.0
ROLLOUTS, OUTCOMES = "tentalis.rollouts.v1", "tentalis.outcomes.v1"

SCHEMAS = {schema.fingerprint: schema for schema in avro.all_current()}
ROLLOUT, OUTCOME = avro.current("Rollout"), avro.current("Outcome")


def decode(value: bytes) -> tuple[str, Any]:
    schema = SCHEMAS[value[2:10]]
    return schema.name, fastavro.schemaless_reader(io.BytesIO(value[10:]), schema.parsed, None)


def encode(schema: avro.AvroSchema, datum: dict[str, Any]) -> bytes:
    buffer = io.BytesIO(b"\xc3\x01" + schema.fingerprint)
    buffer.seek(10)
    fastavro.schemaless_writer(buffer, schema.parsed, datum)
    return buffer.getvalue()


def canonical(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, int):
        return struct.pack(">q", value)
    items = [canonical(item) for item in value]
    return b"".join(struct.pack(">q", len(item)) + item for item in items)


def digest(rollout: dict[str, Any]) -> str:
    head, sampling = rollout["head"], rollout["sampling"]
    fields = {
        "rollout_id": rollout["rollout_id"],
        "policy": head["policy"],
        "environment": head["environment"],
        "token_ids": rollout["token_ids"],
        "loss_mask": rollout["loss_mask"],
        "sampler_logprobs": rollout["sampler_logprobs"],
        "logprobs_mode": rollout["logprobs_mode"],
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "top_k": sampling["top_k"],
        "constrained": sampling["constrained"],
        "policy_spans": [list(span.values()) for span in rollout["policy_spans"]],
        "reward": rollout["reward"],
        "components": [x for name in sorted(rollout["components"]) for x in (name, rollout["components"][name])],
        "n_requested": rollout["n_requested"],
        "n_closed": rollout["n_closed"],
        "group_mean": rollout["group_mean"],
        "group_std": rollout["group_std"],
        "has_rl": rollout["has_rl"],
        "has_opd": rollout["has_opd"],
        "step_scores": rollout["step_scores"],
        "step_spans": [list(span.values()) for span in rollout["step_spans"]],
        "teacher_policy": rollout["teacher_policy"],
        "teacher_logprobs": rollout["teacher_logprobs"],
        "session_id": head["session_id"],
        "turn_index": head["turn_index"],
    }
    sha = hashlib.sha256()
    for name, value in fields.items():
        data = canonical(value)
        sha.update(name.encode() + b"\0" + struct.pack(">q", len(data)) + data)
    return sha.hexdigest()


class OneState(Deserializer):  # type: ignore[misc]
    """Gives all records of a partition the same key, and so the same state."""

    def __call__(self, value: bytes, ctx: Any) -> bytes:
        return b"all"


class ValueOf(Serializer):  # type: ignore[misc]
    """Serializes (topic, key, value) as value."""

    def __call__(self, value: Any, ctx: Any) -> bytes:
        return bytes(value[2])


class Join:
    """The function of the pipeline: takes a raw half and returns a list of (topic, key, value)."""

    def __init__(self) -> None:
        self.time: dict[int, int] = {}
        self.timers: dict[int, list[tuple[int, str]]] = {}

    def __call__(
        self, value: bytes, key: Any, timestamp: int, headers: Any, state: Any
    ) -> list[tuple[str, str, bytes]]:
        context = message_context()
        partition, offset = context.partition, context.offset
        now = self.time[partition] = max(self.time.get(partition, 0), timestamp)
        timers = self.timers.get(partition)
        if timers is None:
            timers = self.timers[partition] = self.recovered(state)
        out: list[tuple[str, str, bytes]] = []
        while timers and timers[0][0] < now:
            self.due(heapq.heappop(timers)[1], partition, state, now, out)
        name, half = decode(value)
        if name in ("Score", "Hint"):
            self.half(name, half, value, partition, offset, state, now, out)
        return out

    def recovered(self, state: Any) -> list[tuple[int, str]]:
        """The timers of the tasks in the store, read through a private API: no public one iterates over a state."""
        timers = []
        for key, value in state._transaction._partition.iter_items(PREFIX + b"task/", PREFIX + b"task0"):
            _, due, *_ = HEAD.unpack_from(value)
            timers.append((due, key[len(PREFIX + b"task/") :].decode()))
        heapq.heapify(timers)
        return timers

    def half(
        self, name: str, half: Any, raw: bytes, partition: int, offset: int, state: Any, now: int, out: list[Any]
    ) -> None:
        sample = half["sample"]
        head, index = sample["head"], sample["sample_index"]
        task_id = head["task_id"]
        entry = entry_of(half["score_id" if name == "Score" else "hint_id"], index, sample["result_id"], offset)
        value = state.get_bytes(b"task/" + task_id.encode())
        if value is None:
            deadline = min(half["opened_at"], now) + head["terms"]["deadline_ms"]
            phase, came, n, seen = 1, 0, 0, b""
            heapq.heappush(self.timers[partition], (deadline, task_id))
        else:
            phase, deadline, came, _, n = HEAD.unpack_from(value)
            seen = value[HEAD.size :]
            if phase == 2 or any(seen[at : at + 8] == entry[:8] for at in range(0, len(seen), ENTRY_BYTES)):
                return
        if name == "Score":
            came = now
            heapq.heappush(self.timers[partition], (now + head["terms"]["opd_window_ms"], task_id))
        n += 1
        seen += entry
        if n < 2 * head["n_samples"]:
            state.set_bytes(b"half/%d" % offset, raw)
            state.set_bytes(b"task/" + task_id.encode(), HEAD.pack(phase, deadline, came, head["n_samples"], n) + seen)
        else:
            self.close(task_id, seen, partition, state, now, out, {offset: (name, half)})

    def due(self, task_id: str, partition: int, state: Any, now: int, out: list[Any]) -> None:
        value = state.get_bytes(b"task/" + task_id.encode())
        if value is None:
            return
        phase, deadline, came, samples, _ = HEAD.unpack_from(value)
        if phase == 2:
            state.delete(b"task/" + task_id.encode())
        elif deadline < now or (samples == 1 and came):
            self.close(task_id, value[HEAD.size :], partition, state, now, out, {})

    def close(
        self, task_id: str, seen: bytes, partition: int, state: Any, now: int, out: list[Any], halves: dict[int, Any]
    ) -> None:
        samples: dict[int, dict[str, Any]] = {}
        for at in range(0, len(seen), ENTRY_BYTES):
            index, offset = (
                int.from_bytes(seen[at + 8 : at + 12], "big"),
                int.from_bytes(seen[at + 20 : at + 28], "big"),
            )
            known = halves.get(offset)
            if known is None:
                known = decode(state.get_bytes(b"half/%d" % offset))
                state.delete(b"half/%d" % offset)
            samples.setdefault(index, {})[known[0]] = (known[1], offset)
        rewards = [s["Score"][0]["reward"] for s in samples.values() if "Score" in s]
        mean = std = None
        if rewards:
            mean = sum(rewards) / len(rewards)
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        for index in sorted(samples):
            self.emit(task_id, index, samples[index], len(samples), mean, std, partition, now, out)
        state.set_bytes(b"task/" + task_id.encode(), HEAD.pack(2, now + MARKER_TTL_MS, 0, len(samples), 0) + seen)
        heapq.heappush(self.timers[partition], (now + MARKER_TTL_MS, task_id))

    def emit(
        self,
        task_id: str,
        index: int,
        halves: dict[str, Any],
        n_closed: int,
        mean: float | None,
        std: float | None,
        partition: int,
        now: int,
        out: list[Any],
    ) -> None:
        score, hint = (halves.get(name, (None, -1))[0] for name in ("Score", "Hint"))
        with_tokens = [half["sample"] for half in (score, hint) if half is not None]
        sample = next((one for one in with_tokens if one["token_ids"]), with_tokens[0])
        head, key = sample["head"], f"{task_id}/{index}"
        used = hint if hint is not None and hint["kind"] == "accepted" else None
        provenance = [
            {
                "half": name.lower(),
                "half_id": half["score_id" if name == "Score" else "hint_id"],
                "topic": HALVES,
                "partition": partition,
                "offset": offset,
            }
            for name in ("Score", "Hint")
            if name in halves
            for half, offset in (halves[name],)
        ]
        rollout = {
            "rollout_id": key,
            "rollout_event_id": derived_id("rollout", key),
            "event_time": now,
            "head": head,
            "sample_index": index,
            "result_id": sample["result_id"],
            "worker_id": sample["worker_id"],
            "token_ids": sample["token_ids"],
            "loss_mask": sample["loss_mask"],
            "sampler_logprobs": sample["sampler_logprobs"],
            "logprobs_mode": sample["logprobs_mode"],
            "sampling": sample["sampling"],
            "policy_spans": sample["policy_spans"],
            "reward": score["reward"] if score else None,
            "components": score["components"] if score else {},
            "n_requested": head["n_samples"],
            "n_closed": n_closed,
            "group_mean": mean,
            "group_std": std,
            "has_rl": score is not None,
            "has_opd": used is not None,
            "step_scores": score["step_scores"] if score else b"",
            "step_spans": score["step_spans"] if score else [],
            "hints": used["hints"] if used else [],
            "teacher_policy": used["teacher_policy"] if used else None,
            "teacher_logprobs": used["teacher_logprobs"] if used else None,
            "topk": used["topk"] if used else 0,
            "topk_ids": used["topk_ids"] if used else b"",
            "topk_logprobs": used["topk_logprobs"] if used else b"",
            "provenance": provenance,
            "forgotten": False,
        }
        rollout["digest"] = digest(rollout)
        outcome = {
            "outcome_id": derived_id("outcome", key),
            "outcome_key": key,
            "event_time": now,
            "kind": "both" if score and used else "rl" if score else "opd",
            "head": head,
            "sample_index": index,
            "result_id": sample["result_id"],
            "worker_id": sample["worker_id"],
            "policy_spans": sample["policy_spans"],
            "reward": rollout["reward"],
            "components": rollout["components"],
            "has_rl": rollout["has_rl"],
            "has_opd": rollout["has_opd"],
            "rollout_id": key,
            "rollout_digest": rollout["digest"],
            "n_closed": n_closed,
        }
        out.append((ROLLOUTS, key, encode(ROLLOUT, rollout)))
        out.append((OUTCOMES, key, encode(OUTCOME, outcome)))


def main(bootstrap: str, group: str, state_dir: str) -> None:
    logging.disable(logging.WARNING)
    app = Application(
        broker_address=ConnectionConfig(bootstrap_servers=bootstrap),
        consumer_group=group,
        auto_offset_reset="earliest",
        commit_interval=COMMIT_S,
        state_dir=state_dir,
        auto_create_topics=True,
        # A static member, as in ours: the successor of a killed process does not wait for the session timeout.
        consumer_extra_config={"group.instance.id": "bench", "session.timeout.ms": 10_000},
        producer_extra_config={
            "enable.idempotence": True,
            "compression.type": "zstd",
            "compression.level": 1,
            "partitioner": "murmur2_random",
            "message.max.bytes": 16 * 2**20,
        },
        loglevel=None,
    )
    halves = app.topic(HALVES, key_deserializer=OneState(), value_deserializer="bytes")
    outputs = {
        name: app.topic(name, key_serializer="string", value_serializer=ValueOf()) for name in (ROLLOUTS, OUTCOMES)
    }
    frame = app.dataframe(halves)
    frame = frame.apply(Join(), stateful=True, expand=True, metadata=True)
    frame = frame.to_topic(lambda value, key, timestamp, headers: outputs[value[0]], key=lambda value: value[1])
    app.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
