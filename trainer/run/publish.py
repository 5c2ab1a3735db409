"""Rank 0's writes: manifest, plans, results, adapters. Each is idempotent, and only the newest process can write."""

import logging
import threading
from collections.abc import Callable, Collection, Iterable

from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.ids import policy_name, sha256_hex
from schemas.records import Canary, PolicyUpdate, Record, RunManifest
from schemas.tensors import float32_bytes, int32_bytes
from schemas.wire.codec import Codec
from tentalis.kafka.acls import Operation
from tentalis.kafka.config import producer_config
from tentalis.kafka.errors import TRANSIENT, Unreachable, refused, unreachable
from tentalis.kafka.producer import checked_size, headers_of
from tentalis.service.lifecycle import Unmendable
from tentalis.service.settings import Settings
from tentalis.storage.file_set import list_sets, read_manifest, remove_set, write_set
from tentalis.storage.location import Location
from tentalis.storage.objects import delete_objects
from tentalis.text.timestamps import now_ms
from trainer.distributed.consumer_group import TrainerFenced, consumer_group
from trainer.model.policy import TrainedPolicy, canary_tokens
from trainer.run.checkpoint import Checkpoint, remove_folder, write_folder

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 60.0


class AdapterExists(Unmendable):
    """The folder of a new adapter holds another adapter: names are never reused."""


class TransactionalWriter:
    """Writes rank 0's records to the log, one transaction per record, from any thread."""

    def __init__(self, settings: Settings, codec: Codec, policy: str) -> None:
        """Fences out every earlier trainer of the policy. Raises Unreachable, Forbidden, KafkaException."""
        self._settings, self._policy, self._codec = settings, policy, codec
        self._lock = threading.Lock()
        # librdkafka rejects a delivery timeout above the transaction's.
        timeouts = {"delivery.timeout.ms": 50_000, "transaction.timeout.ms": 60_000}
        self._producer = Producer(producer_config(settings, transactional_id=consumer_group(policy)) | timeouts)
        try:
            self._producer.init_transactions(INIT_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() in TRANSIENT:
                raise Unreachable(unreachable(settings, error.args[0].str(), INIT_TIMEOUT_S)) from error
            raise refused(settings, error.args[0], Operation.WRITE, "", consumer_group(policy)) from error

    def write(self, topic: str, record: Record, traceparent: str | None = None) -> None:
        """Writes a record; returns when it is committed. Readers see it when the broker has written the transaction's
        markers, some milliseconds later. Raises RecordTooLarge, TrainerFenced, Forbidden, KafkaException."""
        value = checked_size(topic, record.key, self._codec.encode(topic, record))
        headers = headers_of(record, "tentalis-trainer", traceparent)
        try:
            with self._lock:
                self._producer.begin_transaction()
                self._producer.produce(topic, value, record.key.encode(), headers=headers)
                # The commit flushes first, and fails if a record was not delivered.
                self._producer.commit_transaction(60.0)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH):
                raise TrainerFenced(self._policy) from error
            raise refused(self._settings, cause, Operation.WRITE, topic, consumer_group(self._policy)) from error
        log.info("%s %s", type(record).__name__, record.key)


def publish_adapter(place: Location, version: int, checkpoint: Checkpoint) -> Location:
    """Copies the checkpoint's adapter to the place of the policy's adapters, from where servers load it; returns the
    version's own place. Raises AdapterExists, StorageError, OSError."""
    place = place / f"v{version}"
    folder, name = place.folder, checkpoint.weights_name
    present_sha256 = _published_sha256(place, name)
    if present_sha256 not in (None, checkpoint.state.adapter_sha256):
        raise AdapterExists(
            f"{place} holds an adapter with sha256 {present_sha256}, but "
            f"{policy_name(checkpoint.state.policy, version)} has {checkpoint.state.adapter_sha256}. The file is "
            "damaged, or it belongs to a log that is gone. Move the folder away; the trainer writes it again"
        )
    if folder is None:
        write_set(place, checkpoint.folder, checkpoint.version_files)
    elif present_sha256 is None:
        files = {file: (checkpoint.folder / file).read_bytes() for file in checkpoint.version_files if file != name}
        write_folder(folder, files | {name: checkpoint.weights()})
    return place


def _published_sha256(place: Location, name: str) -> str | None:
    """Returns the sha256 of the weights at a place, in the file with this name; None if there are none."""
    if place.folder is not None:
        return sha256_hex((place.folder / name).read_bytes()) if place.folder.exists() else None
    manifest = read_manifest(place)
    return None if manifest is None or name not in manifest.files else manifest.files[name].sha256


def prune_adapters(place: Location, keep: int, needed: Callable[[Collection[int]], Collection[int]]) -> None:
    """Removes a policy's adapters except the `keep` newest and the needed ones. A server that has loaded one keeps it
    in memory. Raises StorageError, OSError."""
    if place.folder is None:
        listing = list_sets(place)
        delete_objects(place, listing.leftovers)
        names: Iterable[str] = listing.sets
    else:
        names = (path.name for path in place.folder.glob("v*"))
    present = sorted(int(name[1:]) for name in names if name[1:].isdigit())
    kept = {*present[-keep:], *needed(present)}
    for version in present:
        if version in kept:
            continue
        if place.folder is None:
            remove_set(place / f"v{version}")
        else:
            remove_folder(place.folder / f"v{version}")


def canary_of(policy: TrainedPolicy) -> Canary:
    """Returns a fixed sequence of tokens with the policy's log-probs: a server's are compared with them."""
    tokens = canary_tokens(policy.vocab_size)
    return Canary(token_ids=int32_bytes(tokens.numpy()), logprobs=float32_bytes(policy.token_logprobs(tokens).numpy()))


def policy_update(
    manifest: RunManifest, checkpoint: Checkpoint, place: Location, canary: Canary, rank: int, base_model: str
) -> PolicyUpdate:
    """Returns the announcement of an adapter. `canary`: of the policy with that adapter; `rank`: the adapter's, 0 for
    a whole model."""
    return PolicyUpdate(
        policy=manifest.policy,
        version=manifest.first_version + checkpoint.state.step,
        event_time=now_ms(),
        run_id=manifest.run_id,
        step=checkpoint.state.step,
        sha256=checkpoint.state.adapter_sha256,
        location=place.url,
        base_model=base_model,
        base_sha256=manifest.base_sha256,
        rank=rank,
        canary=canary,
    )
