"""The position of a policy's trainer on the rollout topic, as its records say it. The committed offsets of its group
are for monitoring only."""

from schemas import topics
from schemas.records import RunManifest
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.moved_topics import moves
from tentalis.kafka.offsets import end_offsets
from tentalis.service.settings import Settings
from trainer.data.positions import offsets_of
from trainer.run.run_log import decode_record, read_run


def trainer_position(settings: Settings, codec: Codec, policy: str) -> dict[int, int] | None:
    """Returns, per partition, the first offset that no trained step of the policy's newest run has considered; None if
    the policy has no run."""
    newest: RunManifest | None = None
    for stored in read_to_end(settings, topics.RUNS):
        record = decode_record(stored, codec)
        if isinstance(record, RunManifest) and record.policy == policy:
            newest = record
    if newest is None:
        return None
    run = read_run(settings, codec, newest.run_id, policy)
    result = run.winning_result(run.last_step)
    plan = None if result is None else run.plans.get((result.step, result.attempt))
    first = newest if run.first_manifest is None else run.first_manifest
    moved = start_after_move(settings, codec, first.event_time if plan is None else plan.event_time)
    if moved is not None:
        return moved
    return offsets_of(first.start) | ({} if plan is None else offsets_of(plan.low_water))


def start_after_move(settings: Settings, codec: Codec, at: int) -> dict[int, int] | None:
    """Returns the beginning of each partition if the rollouts topic was moved to more partitions after a time (ms):
    offsets from before mean nothing there. Else None."""
    if not any(record.event_time > at for record in moves(settings, codec, topics.ROLLOUTS)):
        return None
    return dict.fromkeys(end_offsets(settings, topics.ROLLOUTS), 0)
