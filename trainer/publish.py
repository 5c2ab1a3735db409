"""What rank 0 writes: manifest, plans, results, adapters. Each is idempotent, and only the newest process can write."""

import logging
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.codec import Codec
from schemas.ids import policy_name, sha256_hex
from schemas.records import Canary, PolicyUpdate, Record, RunManifest
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.acls import Operation
from tentalis.config import Settings
from tentalis.kafka import checked_size, headers_of, now_ms, producer_config
from tentalis.refusal import refused
from tentalis.service import Unmendable
from trainer.checkpoint import Checkpoint, write_folder
from trainer.group import Fenced, group_of
from trainer.model import CONFIG_FILE, WEIGHTS_FILE, Policy, canary_tokens

log = logging.getLogger(__name__)


class AdapterExists(Unmendable):
    """The place of a new adapter holds another one: names are never reused."""


class Ledger:
    """The log as rank 0 writes it, one transaction per record."""

    def __init__(self, settings: Settings, codec: Codec, policy: str) -> None:
        """Fences out every earlier trainer of the policy. Raises Forbidden, KafkaException."""
        self._settings, self._policy, self._codec = settings, policy, codec
        # librdkafka refuses a delivery timeout beyond the transaction's.
        timeouts = {"delivery.timeout.ms": 50_000, "transaction.timeout.ms": 60_000}
        self._producer = Producer(producer_config(settings, transactional_id=group_of(policy)) | timeouts)
        try:
            self._producer.init_transactions(60.0)
        except KafkaException as error:
            raise refused(settings, error.args[0], Operation.WRITE, "", group_of(policy)) from error

    def write(self, topic: str, record: Record, traceparent: str | None = None) -> None:
        """Returns when the record is committed; readers see it when the broker has written the transaction's markers,
        some milliseconds later. Raises RecordTooLarge, Fenced, Forbidden, KafkaException."""
        value = checked_size(topic, record.key, self._codec.encode(topic, record))
        try:
            self._producer.begin_transaction()
            headers = headers_of(record, "tentalis-trainer", traceparent)
            self._producer.produce(topic, value, record.key.encode(), headers=headers)
            # Flushes first; a record that was not delivered fails the commit.
            self._producer.commit_transaction(60.0)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
                raise Fenced(self._policy) from error
            raise refused(self._settings, cause, Operation.WRITE, topic, group_of(self._policy)) from error
        log.info("%s %s", type(record).__name__, record.key)


def published_folder(home: Path, policy: str, version: int) -> Path:
    """Where servers load an adapter from."""
    return home / "adapters" / policy / f"v{version}"


def publish_adapter(home: Path, policy: str, version: int, checkpoint: Checkpoint) -> Path:
    """Puts the checkpoint's adapter where servers load it from, and returns the folder. Raises AdapterExists."""
    folder = published_folder(home, policy, version)
    weights = checkpoint.adapter()
    if folder.exists():
        present = sha256_hex((folder / WEIGHTS_FILE).read_bytes())
        if present != checkpoint.state.adapter_sha256:
            raise AdapterExists(
                f"{folder} holds an adapter with sha256 {present}, but {policy_name(policy, version)} has "
                f"{checkpoint.state.adapter_sha256}. Its file was "
                "damaged, or it belongs to a log that is gone: move the folder away, and it is written again"
            )
        return folder
    write_folder(folder, {CONFIG_FILE: (checkpoint.folder / CONFIG_FILE).read_bytes(), WEIGHTS_FILE: weights})
    return folder


def prune_adapters(home: Path, policy: str, keep: int, needed: Callable[[Collection[int]], Collection[int]]) -> None:
    """Removes the policy's adapters but for the `keep` newest and those that are needed. A server that has one loaded
    keeps it."""
    folder = home / "adapters" / policy
    present = sorted(int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit())
    kept = {*present[-keep:], *needed(present)}
    for version in present:
        if version not in kept:
            shutil.rmtree(folder / f"v{version}")


def policy_update(
    manifest: RunManifest, checkpoint: Checkpoint, folder: Path, policy: Policy, base_model: str
) -> PolicyUpdate:
    """The announcement of an adapter, with the trainer's own log-probs of the canary. `policy` holds that adapter."""
    tokens = canary_tokens(policy.vocab_size)
    return PolicyUpdate(
        policy=manifest.policy,
        version=manifest.first_version + checkpoint.state.step,
        event_time=now_ms(),
        run_id=manifest.run_id,
        step=checkpoint.state.step,
        sha256=checkpoint.state.adapter_sha256,
        location=folder.absolute().as_uri(),
        base_model=base_model,
        base_sha256=manifest.base_sha256,
        rank=policy.rank,
        canary=Canary(
            token_ids=int32_bytes(tokens.numpy()),
            logprobs=float32_bytes(policy.score(tokens).numpy()),
        ),
    )
