"""Rank 0's writes: manifest, plans, results, adapters. Each is idempotent, and only the newest process can write."""

import logging
import shutil
from collections.abc import Callable, Collection, Iterable

from confluent_kafka import KafkaError, KafkaException, Producer

from schemas.ids import policy_name, sha256_hex
from schemas.records import Canary, PolicyUpdate, Record, RunManifest
from schemas.tensors import float32_bytes, int32_bytes
from schemas.wire.codec import Codec
from tentalis.kafka.acls import Operation
from tentalis.kafka.config import producer_config
from tentalis.kafka.errors import refused
from tentalis.kafka.producer import checked_size, headers_of
from tentalis.service.lifecycle import Unmendable
from tentalis.service.settings import Settings
from tentalis.storage.file_set import list_sets, read_manifest, remove_set, write_set
from tentalis.storage.location import Location
from tentalis.storage.objects import delete_objects
from tentalis.text.timestamps import now_ms
from trainer.distributed.consumer_group import TrainerFenced, consumer_group
from trainer.model.model import CONFIG_FILE, WEIGHTS_FILE, LoraPolicy, canary_tokens
from trainer.run.checkpoint import Checkpoint, write_folder

log = logging.getLogger(__name__)


class AdapterExists(Unmendable):
    """The folder of a new adapter holds another adapter: names are never reused."""


class TransactionalWriter:
    """Writes rank 0's records to the log, one transaction per record."""

    def __init__(self, settings: Settings, codec: Codec, policy: str) -> None:
        """Fences out every earlier trainer of the policy. Raises Forbidden, KafkaException."""
        self._settings, self._policy, self._codec = settings, policy, codec
        # librdkafka rejects a delivery timeout above the transaction's.
        timeouts = {"delivery.timeout.ms": 50_000, "transaction.timeout.ms": 60_000}
        self._producer = Producer(producer_config(settings, transactional_id=consumer_group(policy)) | timeouts)
        try:
            self._producer.init_transactions(60.0)
        except KafkaException as error:
            raise refused(settings, error.args[0], Operation.WRITE, "", consumer_group(policy)) from error

    def write(self, topic: str, record: Record, traceparent: str | None = None) -> None:
        """Writes a record; returns when it is committed. Readers see it when the broker has written the transaction's
        markers, some milliseconds later. Raises RecordTooLarge, TrainerFenced, Forbidden, KafkaException."""
        value = checked_size(topic, record.key, self._codec.encode(topic, record))
        try:
            self._producer.begin_transaction()
            headers = headers_of(record, "tentalis-trainer", traceparent)
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
    folder, weights = place.folder, checkpoint.adapter()
    present_sha256 = _published_sha256(place)
    if present_sha256 not in (None, checkpoint.state.adapter_sha256):
        raise AdapterExists(
            f"{place} holds an adapter with sha256 {present_sha256}, but "
            f"{policy_name(checkpoint.state.policy, version)} has {checkpoint.state.adapter_sha256}. The file is "
            "damaged, or it belongs to a log that is gone. Move the folder away; the trainer writes it again"
        )
    if folder is None:
        write_set(place, checkpoint.folder, (CONFIG_FILE, WEIGHTS_FILE))
    elif present_sha256 is None:
        write_folder(folder, {CONFIG_FILE: (checkpoint.folder / CONFIG_FILE).read_bytes(), WEIGHTS_FILE: weights})
    return place


def _published_sha256(place: Location) -> str | None:
    """Returns the sha256 of the adapter at a place, None if there is none."""
    if place.folder is not None:
        return sha256_hex((place.folder / WEIGHTS_FILE).read_bytes()) if place.folder.exists() else None
    manifest = read_manifest(place)
    return None if manifest is None or WEIGHTS_FILE not in manifest.files else manifest.files[WEIGHTS_FILE].sha256


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
            shutil.rmtree(place.folder / f"v{version}")


def policy_update(
    manifest: RunManifest, checkpoint: Checkpoint, place: Location, policy: LoraPolicy, base_model: str
) -> PolicyUpdate:
    """Returns the announcement of an adapter, with the trainer's own log-probs of the canary. `policy` must hold that
    adapter."""
    tokens = canary_tokens(policy.vocab_size)
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
        rank=policy.rank,
        canary=Canary(
            token_ids=int32_bytes(tokens.numpy()),
            logprobs=float32_bytes(policy.token_logprobs(tokens).numpy()),
        ),
    )
