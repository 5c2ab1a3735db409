"""Tokens per second of a replay's data path, compared with the trainer's in the same run.

BENCH_STEPS (64) steps of 32 rollouts are written to a broker as in the assistant demo and planned. The data path is all
work of a replay besides training: before training every planned rollout is looked up and its digest verified, then per
step the rollouts are fetched again, decoded, verified and packed. The trainer's rate is that of the whole step on the
first plan.
"""

import os
import time
from pathlib import Path

from schemas import topics
from schemas.records import BatchPlan, Rollout
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.service.settings import Settings
from tests.bench.bench_trainer import Ours, lay
from tests.bench.lab import log, own_kafka, report
from tests.bench.trainer_rollouts import grouped

BATCH = 32


def plans_of(settings: Settings) -> list[BatchPlan]:
    """Plans of all rollouts on the topic, BATCH each, ordered across partitions by append time as in the planner."""
    from trainer.data.candidates import offer_of
    from trainer.data.plan import BatchDraft, PlanContext, plan_of

    codec = make_codec(settings)
    offers = []
    for stored in read_to_end(settings, topics.ROLLOUTS):
        record = stored.decode(codec)
        assert isinstance(record, Rollout)
        offers.append(offer_of(record, stored.partition, stored.offset, stored.timestamp, 4096))
    offers.sort(key=lambda offer: (offer.append_time, offer.partition, offer.offset))
    head = PlanContext("bench", "bench", "manifest", 1, 1024, 0, "bench")
    return [
        plan_of(BatchDraft(tuple(offers[first : first + BATCH]), (), {0: 0}, ()), head, step, 1, 0)
        for step, first in enumerate(range(0, len(offers), BATCH), 1)
    ]


def data_path(settings: Settings, plans: list[BatchPlan], of: Ours) -> tuple[float, float]:
    """Seconds of the verification before training, and of fetching and packing all steps."""
    from trainer.data.fetch import RolloutCache, fetch, find_problems
    from trainer.step.step import build_examples, pack_micro_batches

    codec = make_codec(settings)
    began = time.perf_counter()
    assert not find_problems(settings, codec, [row for plan in plans for row in plan.rows])
    checked = time.perf_counter()
    for plan in plans:
        rollouts = fetch(settings, codec, plan.rows, RolloutCache())
        pack_micro_batches(build_examples(plan.rows, rollouts, of.of.loss, of.world)[1], of.of.loss)
    return checked - began, time.perf_counter() - checked


def main() -> None:
    from transformers import AutoConfig

    from tentalis.inference.models import resolve_model

    steps = int(os.environ.get("BENCH_STEPS", "64"))
    model: Path = resolve_model(os.environ.get("BENCH_MODEL"), Settings.from_env().cache)
    made = grouped(AutoConfig.from_pretrained(model).vocab_size, steps * BATCH // 8, (40, 60), (8, 64))
    tokens = sum(each.n_tokens for each in made)
    with own_kafka() as settings:
        lay(settings, made)
        plans = plans_of(settings)
        log(f"{len(made)} rollouts, {tokens} tokens, {len(plans)} plans")
        ours = Ours.start(settings, model, plans[0], "float32")
        verify, fetch_and_pack = data_path(settings, plans, ours)
        trained = min(ours.step()[0] for _ in range(3))
    consumed = sum(row.n_tokens for row in plans[0].rows) / trained
    rate = tokens / (verify + fetch_and_pack)
    report(
        data_path_tokens_per_second=rate,
        trainer_tokens_per_second=consumed,
        ratio=rate / consumed,
        verify_seconds=verify,
        fetch_and_pack_seconds=fetch_and_pack,
        tokens=tokens,
        steps=len(plans),
    )


if __name__ == "__main__":
    main()
