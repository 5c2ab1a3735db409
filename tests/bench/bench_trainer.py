"""Tokens per second of the whole training step (pack, loss, optimizer), beside a bare forward and backward pass of the
same sequences with transformers and peft, padded, in the same run.

4 groups of 8 rollouts of mixed length (prompt 40 to 60 tokens, response 8 to 64), as in the assistant demo, on the real
small model. BENCH_STEPS sets how many steps are timed (default 3, after one to warm up).
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from schemas.records import BatchPlan, Rollout
from tentalis.config import Settings
from tests.bench.lab import log, report
from tests.trainer_lab import config, rollout


def make_rollouts(vocabulary: int) -> list[Rollout]:
    """Groups that share their prompt, with rewards and a teacher."""
    draw = np.random.default_rng(0)
    made = []
    for group in range(4):
        prompt = draw.integers(1, vocabulary, draw.integers(40, 61)).tolist()
        rewards = draw.random(8).tolist()
        for index in range(8):
            response = draw.integers(1, vocabulary, draw.integers(8, 65)).tolist()
            sampler = (-2.0 + 0.1 * draw.standard_normal(len(response))).tolist()
            made.append(
                rollout(
                    f"g{group}",
                    index,
                    policy="bench",
                    prompt=prompt,
                    response=response,
                    sampler=sampler,
                    teacher=sampler,
                    reward=rewards[index],
                    rewards=rewards,
                    n=8,
                )
            )
    return made


def plan_for(made: list[Rollout], micro_batch_tokens: int) -> BatchPlan:
    """A plan of all of them for one rank."""
    from trainer.offers import offer_of
    from trainer.plan import Draft, PlanHead, plan_of

    offers = tuple(offer_of(each, 0, offset, 0, 4096) for offset, each in enumerate(made))
    head = PlanHead("bench", "bench", "manifest", 1, micro_batch_tokens, 0, "bench")
    return plan_of(Draft(offers, (), {0: len(made)}, ()), head, 1, 1, 0)


def step_seconds(model: Path, made: list[Rollout], steps: int) -> list[float]:
    """Seconds of each whole step."""
    from trainer import runtime, world
    from trainer.engine import Engine
    from trainer.step import train_step
    from trainer.stop import Stop

    settings = config(
        model, policy="bench", run_id="bench", batch_rollouts=32, micro_batch_tokens=1024, threads=os.cpu_count()
    )
    runtime.prepare(runtime.threads_of(settings, 1), "cpu")
    joined = world.join()
    engine = Engine(settings, model, joined, "cpu")
    plan = plan_for(made, settings.micro_batch_tokens)
    by_key = {each.key: each for each in made}
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        train_step(engine, plan, 0, by_key, settings.loss, joined, Stop())
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def bare_seconds(model: Path, made: list[Rollout], steps: int) -> list[float]:
    """Seconds of a padded forward and backward pass over the same sequences, 8 at a time, logits of every position."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from schemas.tensors import int32_view

    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy: Any = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    seconds = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        for first in range(0, len(made), 8):
            chunk = [torch.from_numpy(int32_view(each.token_ids).astype(np.int64)) for each in made[first : first + 8]]
            ids = torch.nn.utils.rnn.pad_sequence(chunk, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in chunk], batch_first=True)
            logits = policy(input_ids=ids, attention_mask=mask).logits[:, :-1]
            chosen = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])
            (chosen.squeeze(-1) * mask[:, 1:]).sum().backward()
        policy.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> None:
    from transformers import AutoConfig

    from tentalis.inference.models import resolve_model

    steps = int(os.environ.get("BENCH_STEPS", "3"))
    model = resolve_model(os.environ.get("BENCH_MODEL"), Settings.from_env().cache)
    made = make_rollouts(AutoConfig.from_pretrained(model).vocab_size)
    tokens = sum(each.n_tokens for each in made)
    log(f"{len(made)} rollouts, {tokens} tokens")
    ours, bare = step_seconds(model, made, steps), bare_seconds(model, made, steps)
    ours_rate, bare_rate = tokens / float(np.median(ours)), tokens / float(np.median(bare))
    report(
        tokens=tokens,
        steps=steps,
        ours_tokens_per_second=ours_rate,
        bare_padded_tokens_per_second=bare_rate,
        ratio=ours_rate / bare_rate,
        ours_step_seconds=float(np.median(ours)),
    )


if __name__ == "__main__":
    main()
