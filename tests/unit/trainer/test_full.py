"""Full fine-tuning: the gradient of plain PyTorch, the same bytes again, and a version that transformers loads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from schemas.records import Rollout
from tentalis.storage.version_files import MODEL_CONFIG, MODEL_WEIGHTS
from tests.support.trainer_lab import config, examples, rollouts, tiny_model
from trainer.config.file import override_settings, parse_config
from trainer.config.trainer_config import ConfigError, TrainerConfig
from trainer.data.candidates import offer_of
from trainer.data.pack import pack_examples
from trainer.data.plan import BatchDraft, PlanContext, plan_of
from trainer.distributed import ranks
from trainer.distributed.stop import StopRequest
from trainer.model.full import FullPolicy
from trainer.model.logprobs import TokenScores
from trainer.model.policy import adapter_sha256
from trainer.model.trained_head import trained_head_scores
from trainer.replay.compare import model_distance
from trainer.run.checkpoint import CheckpointState, save_checkpoint
from trainer.step.engine import TrainingEngine, parameter_groups
from trainer.step.objective import LossCounts, objective
from trainer.step.step import StepOutput, train_step

BATCHES = [rollouts(2, 4, seed=step, prefix=f"s{step}-") for step in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def full_config(model: Path, **more: Any) -> TrainerConfig:
    return config(model, **({"lora": None, "optimizer": {"lr": 1e-3}} | more))


def engine_of(run_config: TrainerConfig) -> TrainingEngine:
    return TrainingEngine(run_config, Path(run_config.base_model), ranks.join_ranks(), "cpu")


def run_step(engine: TrainingEngine, run_config: TrainerConfig, batch: list[Rollout], step: int = 1) -> StepOutput:
    offers = tuple(offer_of(r, 0, i, 0, 128) for i, r in enumerate(batch))
    draft, head = BatchDraft(offers, (), {0: len(offers)}, ()), PlanContext("run", "tiny", "m", 1, 64, 0, "owner")
    plan, by_key = plan_of(draft, head, step, 1, 0), {r.key: r for r in batch}
    return train_step(engine, plan, step - 1, by_key, run_config.loss, ranks.join_ranks(), StopRequest())


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_gradient_of_a_trained_head_is_autograds(entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three tokens at a time, so that the last chunk is short.
    monkeypatch.setattr("trainer.model.logprobs.CHUNK_BYTES", 4 * 50 * 3)
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=draw).requires_grad_() for shape in ((7, 8), (50, 8))]
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    targets, temperatures = torch.arange(7) * 5, torch.linspace(0.5, 1.5, 7)
    # A target that is also a candidate, a candidate named twice, and places without one.
    candidates = torch.tensor([[5 * i, 3, 3, -1] for i in range(7)])
    shares = torch.randn((7, 4), generator=draw)

    def total(scores: TokenScores) -> torch.Tensor:
        assert scores.candidates is not None
        named = (scores.candidates.masked_fill(candidates < 0, 0.0) * shares).sum()
        entropies = scores.entropies.square().sum() if entropy_gradient else 0.0
        return (scores.logprobs * torch.arange(7)).sum() + named + entropies

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> TokenScores:
        log_p = (hidden @ weight.T / temperatures[:, None]).log_softmax(1)
        logprobs, named = log_p[torch.arange(7), targets], log_p.gather(1, candidates.clamp(min=0))
        return TokenScores(logprobs, -(log_p.exp() * log_p).sum(1), named)

    ours = trained_head_scores(*leaves, targets, temperatures, candidates, entropy_gradient=entropy_gradient)
    theirs = plain(*copies)
    torch.testing.assert_close(ours[:2], theirs[:2])
    total(ours).backward()
    total(theirs).backward()
    for leaf, copy in zip(leaves, copies, strict=True):
        torch.testing.assert_close(leaf.grad, copy.grad)


def test_a_step_is_that_of_plain_adamw_on_all_parameters(model: Path) -> None:
    run_config = full_config(model, optimizer={"lr": 1e-3, "weight_decay": 0.1}, loss={"dual_clip": None})
    engine, plain = engine_of(run_config), FullPolicy(model, "cpu", with_base=False)
    before = load(plain.weights_bytes())
    optimizer = torch.optim.AdamW(parameter_groups(plain.trained_parameters(), 0.1), lr=1e-3, foreach=False)
    assert [len(group["params"]) for group in optimizer.param_groups] == [15, 5], "norms do not decay"
    for step, batch in enumerate(BATCHES, 1):
        run_step(engine, run_config, batch, step)
        every = pack_examples(examples(batch, run_config.loss))
        counts = LossCounts.of([examples(batch, run_config.loss)], run_config.loss)
        objective(plain(every), every.token_targets, run_config.loss, counts)[0].backward()
        torch.nn.utils.clip_grad_norm_(plain.lm.parameters(), run_config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    for (name, ours), (_, theirs) in zip(engine.policy.trained_parameters(), plain.trained_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not torch.equal(ours, before[name]), f"{name} is trained"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_same_plans_give_the_same_bytes_also_over_a_checkpoint(
    model: Path, tmp_path: Path, checkpointing: bool
) -> None:
    run_config = full_config(model, gradient_checkpointing=checkpointing)
    found = []
    for _ in range(2):
        engine = engine_of(run_config)
        assert engine.load_initial_weights() == engine.policy.weights_bytes()
        for step, batch in enumerate(BATCHES[:2], 1):
            run_step(engine, run_config, batch, step)
        found.append(engine.policy.weights_bytes())
    assert found[0] == found[1] != engine.load_initial_weights(), "the base is read again"

    middle = engine_of(run_config)
    run_step(middle, run_config, BATCHES[0])
    state = CheckpointState(
        run_id="run",
        policy="tiny",
        step=1,
        attempt=1,
        plan_id="p",
        owner="owner",
        manifest_digest="m",
        low_water={0: 8},
        adapter_sha256=_sha256(middle),
        optimizer_steps=1,
        metrics={},
        seconds={},
    )
    parts = middle.policy.weights_bytes(), middle.policy.files(), middle.optimizer_state()
    checkpoint = save_checkpoint(tmp_path, state, *parts)
    resumed = engine_of(run_config)
    resumed.restore(checkpoint.weights(), checkpoint.optimizer())
    run_step(resumed, run_config, BATCHES[1], 2)
    assert resumed.policy.weights_bytes() == found[0]
    assert checkpoint.version_files == (MODEL_CONFIG, "generation_config.json", MODEL_WEIGHTS, "tokenizer.json")


def _sha256(engine: TrainingEngine) -> str:
    return adapter_sha256(engine.policy.weights_bytes())


def test_a_version_is_a_model_that_transformers_loads(model: Path, tmp_path: Path) -> None:
    run_config = full_config(model)
    engine = engine_of(run_config)
    run_step(engine, run_config, BATCHES[0])
    files = engine.policy.files()
    for name, data in {**files.others, files.weights: engine.policy.weights_bytes()}.items():
        (tmp_path / name).write_bytes(data)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.float32
    tokens = torch.tensor([3, 10, 20, 30])
    rows = loaded(tokens[None]).logits[0].log_softmax(1)
    expected = rows[torch.arange(3), tokens[1:]].detach()
    torch.testing.assert_close(engine.policy.token_logprobs(tokens)[1:], expected, rtol=1e-4, atol=1e-4)
    assert model_distance(engine.policy.weights_bytes(), engine.policy.weights_bytes(), model).relative == 0.0
    base = FullPolicy(model, "cpu", with_base=False).weights_bytes()
    assert model_distance(engine.policy.weights_bytes(), base, model).relative == 1.0


def test_the_distance_to_the_base_is_to_the_model_as_it_was(model: Path) -> None:
    run_config = full_config(model, loss={"kl": {"coef": 0.1, "against": "base"}})
    engine = engine_of(run_config)
    batch = pack_examples(examples(BATCHES[0]))
    before = engine.policy.base_logprobs(batch)
    # Packed products and plain ones differ in the last bits.
    torch.testing.assert_close(before, engine.policy(batch).logprobs.detach(), rtol=1e-4, atol=1e-4)
    assert run_step(engine, run_config, BATCHES[0]).metrics["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert torch.equal(engine.policy.base_logprobs(batch), before)
    assert run_step(engine, run_config, BATCHES[1], 2).metrics["kl_loss"] > 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_adapter": "folder"}, "initial_adapter needs lora: .*--format merged"),
        ({"base_dtype": "bfloat16"}, "base_dtype: bfloat16 needs lora"),
        ({"optimizer": {"weight_decay": 0.1}}, r"needs optimizer\.lr: its default 0\.0003 is an adapter's"),
    ],
)
def test_settings_that_need_an_adapter_are_refused_without_one(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        full_config(Path("model"), **settings)


def test_an_adapters_moments_are_not_sharded() -> None:
    with pytest.raises(ValidationError, match=r"zero_stage: 1 needs lora: null: the optimizer's state of an adapter"):
        config(Path("model"), zero_stage=1)


def test_null_in_a_file_means_full_fine_tuning() -> None:
    text = "run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\noptimizer: {lr: 1e-5}\nlora: null\n"
    parsed = parse_config(text, "x.yaml")
    assert (parsed.lora, parsed.keep_adapters) == (None, 4)
    assert parse_config(text + "keep_adapters: 9\n", "x.yaml").keep_adapters == 9
    with pytest.raises(ConfigError, match=r"lora and lora_rank contradict each other: lora would be null and"):
        parse_config(text + "lora_rank: 4\n", "x.yaml")


def test_a_change_to_full_fine_tuning_means_what_it_means_in_a_file() -> None:
    """`tentalis learn --set lora=null`: the defaults of the recorded run are an adapter's."""
    adapter = parse_config("run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\n", "x.yaml")
    with pytest.raises(ConfigError, match=r"--set: .*needs optimizer\.lr"):
        override_settings(adapter, {"lora": "null"}, "--set")
    changed = override_settings(adapter, {"lora": "null", "optimizer.lr": "1e-5"}, "--set")
    assert (changed.lora, changed.keep_adapters) == (None, 4)


RANKS_SETTINGS: dict[str, dict[str, Any]] = {
    # The gradient is clipped in the second.
    "plain": {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "grad_clip": 1e9}},
    "clipped": {"optimizer": {"lr": 1e-3, "grad_clip": 1e-3}},
}


def two_ranks(folder: Path, settings: str) -> None:
    """One rank of two (test_ranks.py): trains with and without ZeRO; rank 0 writes sha256 of the weights by name."""
    rank_group, model, found = ranks.join_ranks(), folder / "model", {}
    for stage in (0, 1):
        run_config = full_config(model, zero_stage=stage, **RANKS_SETTINGS[settings])

        def train(engine: TrainingEngine, steps: Sequence[int], run_config: TrainerConfig = run_config) -> None:
            for step in steps:
                # Rank 0 has three micro-batches, rank 1 has two.
                offers = tuple(offer_of(r, 0, i, 0, 128) for i, r in enumerate(BATCHES[step - 1]))
                context = PlanContext("run", "tiny", "m", 2, 40, 0, "owner")
                plan = plan_of(BatchDraft(offers, (), {0: len(offers)}, ()), context, step, 1, 0)
                own = {row.rollout_id for row in plan.rows if row.rank == rank_group.rank}
                rows = {r.key: r for r in BATCHES[step - 1] if r.key in own}
                train_step(engine, plan, step - 1, rows, run_config.loss, rank_group, StopRequest())

        engine = TrainingEngine(run_config, model, rank_group, "cpu")
        engine.load_initial_weights()
        train(engine, (1, 2))
        checkpoint = rank_group.broadcast((engine.policy.weights_bytes(), engine.optimizer_state()))
        before = engine.policy.weights_bytes()
        engine.backward(engine.policy.trained_parameters()[0][1].sum())
        engine.step(3, update=False)
        assert engine.policy.weights_bytes() == before, "a discarded step changes nothing"
        train(engine, (3,))
        found[f"{stage}"] = _sha256(engine)
        resumed = TrainingEngine(run_config, model, rank_group, "cpu")
        resumed.restore(*checkpoint)
        train(resumed, (3,))
        found[f"{stage} resumed"] = _sha256(resumed)
    if rank_group.rank == 0:
        (folder / f"{settings}.json").write_text(json.dumps(found))
