"""Distillation over likeliest tokens from end to end: a server's own answer, a judge's hints, the teacher's lists, the
join, and a step of the trainer. No broker: each hand-over is a record."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas import topics
from schemas.records import HintKind, PolicySpan, Result, Sampling, Score, Source, sample_of
from schemas.tensors import float32_bytes, int32_bytes, int32_view
from streams.apps.hinting.processor import Hinting
from streams.apps.join.emit import Halves, HalvesPartition, group
from tentalis.inference.client import OpenAIClient
from tentalis.opd import FixedModel, Teacher
from tentalis.opd.hinters import JudgeHinter, VoteSettings
from tentalis.opd.tokenizer import check_same_tokens
from tests.support.inference_lab import Lab, make_model, running_server
from tests.support.stream_records import CODEC, make_feedback, make_result, make_task, on_log, read
from tests.support.trainer_lab import config
from trainer.data.candidates import offer_of
from trainer.data.plan import BatchDraft, PlanContext, plan_of
from trainer.distributed import ranks
from trainer.distributed.stop import StopRequest
from trainer.model.policy import adapter_sha256
from trainer.step.engine import TrainingEngine
from trainer.step.step import train_step

pytestmark = pytest.mark.model

ANSWERS = [
    "\\boxed{1} [HINT_START]Name the fox and the dog, nothing else.[HINT_END]",
    "\\boxed{1} [HINT_START]Answer in one line.[HINT_END]",
]


async def taught(server: str) -> tuple[Result, Any]:
    """An answer of the server's, and the OPD half that hinting makes of a complaint about it."""

    async def ask(*question: Any) -> list[str | None]:
        return list(ANSWERS)

    async def model() -> str:
        await check_same_tokens(client, "tiny", client, "tiny")
        return "tiny"

    async with OpenAIClient(server) as client, asyncio.timeout(60):
        while not await client.healthy():  # noqa: ASYNC110 - it is another process, as far as this one can tell
            await asyncio.sleep(0.05)
        task = make_task(policy="tiny", n_samples=1)
        messages = [message.model_dump() for message in task.messages]
        generation = await client.generate("tiny", messages, max_tokens=6, seed=3)
        completion, prompt = generation.completions[0], generation.prompt_token_ids.tolist()
        result = make_result(
            task,
            text=completion.text,
            prompt=prompt,
            response=completion.token_ids.tolist(),
            sampler_logprobs=float32_bytes(completion.logprobs),
            policy_spans=(PolicySpan(start=0, policy="tiny@v0"),),
            sampling=Sampling(),
        )
        judge = JudgeHinter(SimpleNamespace(ask=ask), ["m"], VoteSettings(votes=2, select="all"))
        app = Hinting(CODEC, Teacher(client, FixedModel(model), 4), hinters={"*": judge})
        effects = await app.process(3, [on_log(topics.FEEDBACK, make_feedback(result, "No, in one line."))])
        return result, read(effects.outputs[0])


def test_hints_of_a_judge_move_the_policy_by_their_likeliest_tokens(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    with running_server(Lab(folder)) as server:
        result, hint = asyncio.run(taught(server))
    assert (hint.kind, hint.topk) == (HintKind.ACCEPTED, 4)
    assert hint.hints == ("Answer in one line.", "Name the fox and the dog, nothing else.")
    listed = int32_view(hint.topk_ids).reshape(2, -1, 4)
    assert listed.shape[1] * 4 == len(hint.sample.token_ids) and (listed[0] != listed[1]).any()
    assert hint.sample.token_ids == result.prompt_token_ids + int32_bytes(int32_view(result.response_token_ids))

    score = Score(
        score_id="s", event_time=1, opened_at=1, sample=sample_of(result), source=Source.RESULT, scorer="none/1"
    )
    ((outcome, rollout),) = group(
        HalvesPartition(topics.HALVES, 0), result.task.head, {0: Halves(score, 0, hint, 1)}, 1
    )
    assert outcome.has_opd and rollout is not None and rollout.topk == 4

    run_config = config(
        folder, loss={"opd_kind": "topk", "topk": {"k": 4}}, max_rollout_tokens=256, micro_batch_tokens=256
    )
    engine = TrainingEngine(run_config, folder, ranks.join_ranks(), "cpu")
    before = adapter_sha256(engine.policy.weights_bytes())
    offer = offer_of(rollout, 0, 0, 0, 256, run_config.loss)
    assert (offer.unfit, offer.rl, offer.opd) == (None, False, True)
    plan = plan_of(BatchDraft((offer,), (), {0: 1}, ()), PlanContext("run", "tiny", "m", 1, 256, 0, "owner"), 1, 1, 0)
    outcome_of_step = train_step(
        engine, plan, 0, {rollout.key: rollout}, run_config.loss, ranks.join_ranks(), StopRequest()
    )
    metrics = outcome_of_step.metrics
    assert metrics["opd_tokens"] == len(result.response_token_ids) // 4
    assert metrics["opd_loss"] != 0.0 and metrics["opd_overlap"] > 0.0 and metrics["grad_norm"] > 0.0
    assert adapter_sha256(engine.policy.weights_bytes()) != before
