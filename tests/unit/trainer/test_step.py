"""The optimizer step: equal to plain PyTorch, the same bytes again, also over a checkpoint."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.records import BatchPlan, Rollout
from schemas.tensors import float32_bytes, int32_bytes
from tests.support.nothing_read_back import NothingIsReadBack
from tests.support.trainer_lab import config, examples, rollout, rollouts, tiny_model
from trainer.config.loss import LossConfig
from trainer.config.trainer_config import TrainerConfig
from trainer.data.candidates import offer_of
from trainer.data.pack import layout_of, pack_examples
from trainer.data.plan import BatchDraft, PlanContext, plan_of
from trainer.distributed import ranks
from trainer.distributed.stop import StopRequest, StopRequested
from trainer.model.model import BadAdapter, BadTargets, LoraPolicy
from trainer.model.policy import adapter_sha256, canary_tokens
from trainer.run.checkpoint import (
    OPTIMIZER_FILE,
    BadCheckpoint,
    Checkpoint,
    CheckpointState,
    read_checkpoints,
    remove_checkpoints,
    remove_leftovers,
    save_checkpoint,
    write_folder,
)
from trainer.step.engine import TrainingDiverged, TrainingEngine
from trainer.step.objective import LossCounts, objective
from trainer.step.step import StepOutput, pack_micro_batches, run_micro_batches, train_step


@pytest.fixture(scope="module")
def run_config(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    return config(tiny_model(tmp_path_factory.mktemp("model")))


def engine_of(run_config: TrainerConfig) -> TrainingEngine:
    return TrainingEngine(run_config, Path(run_config.base_model), ranks.join_ranks(), "cpu")


def plan_for(batch: list[Rollout], step: int = 1, micro_batch_tokens: int = 64) -> BatchPlan:
    offers = tuple(offer_of(r, 0, i, 0, 128) for i, r in enumerate(batch))
    assert all(offer.unfit is None for offer in offers)
    head = PlanContext("run", "tiny", "m", 1, micro_batch_tokens, 0, "owner")
    return plan_of(BatchDraft(offers, (), {0: len(offers)}, ()), head, step, 1, 0)


def run_step(
    engine: TrainingEngine, run_config: TrainerConfig, batch: list[Rollout], step: int = 1, tokens: int = 64
) -> StepOutput:
    plan = plan_for(batch, step, tokens)
    return train_step(
        engine, plan, step - 1, {r.key: r for r in batch}, run_config.loss, ranks.join_ranks(), StopRequest()
    )


TEACHER = rollout(
    "topk", topk=3, topk_ids=int32_bytes([1, 2, 3] * 7), topk_logprobs=float32_bytes([-2.0] * 21), teacher=[-3.0] * 3
)
BATCHES = [rollouts(2, 4, seed=step, prefix=f"s{step}-") for step in range(3)]


def test_a_step_is_that_of_plain_adamw(run_config: TrainerConfig) -> None:
    # These rollouts are far off-policy. Where dual_clip bounds their tokens, gradients are rounding noise, whose sign
    # alone decides a step of Adam.
    run_config = run_config.model_copy(update={"loss": run_config.loss.model_copy(update={"dual_clip": None})})
    engine = engine_of(run_config)
    plain = LoraPolicy(Path(run_config.base_model), "tiny-base", run_config.lora, run_config.seed, "cpu", torch.float32)
    parameters = [parameter for _, parameter in plain.trained_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=run_config.optimizer.lr, weight_decay=0.0, foreach=False)
    for step, batch in enumerate(BATCHES, 1):
        outcome = run_step(engine, run_config, batch, step)
        every = examples(batch)
        total, _ = objective(
            plain(pack_examples(every)),
            pack_examples(every).token_targets,
            run_config.loss,
            LossCounts.of([every], run_config.loss),
        )
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, run_config.optimizer.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        assert outcome.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for (name, ours), theirs in zip(engine.policy.trained_parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("trained", ["adapter", "whole"])
def test_a_gpu_gets_the_next_micro_batch_without_being_waited_for(
    run_config: TrainerConfig, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, loss and backward of several micro-batches that are on their device, with flash attention as a GPU has
    it (its result is of no account here). DeepSpeed's own reduction, after the last one, is not part of it."""

    def kernel(query: Tensor, *_: object, scale: float, window_size: object, enable_gqa: bool = False) -> Tensor:
        return query * scale

    against_base = {"kl": {"coef": 0.3, "against": "base", "kind": "k3"}, "entropy_coef": 0.2}
    losses = map(LossConfig.model_validate, ({}, against_base, {"kind": "gspo", "opd_kind": "topk", "topk": {"k": 3}}))
    whole = {"lora": None, "loss": LossConfig.model_validate(against_base)}
    engine = engine_of(run_config if trained == "adapter" else run_config.model_copy(update=whole))
    for loss in losses:
        made = [[TEACHER, *batch] for batch in BATCHES[:2]] if loss.opd_kind == "topk" else BATCHES[:2]
        micro_batches = pack_micro_batches([examples(batch, loss) for batch in made], loss)
        counts = LossCounts.of([examples(batch, loss) for batch in made], loss)
        with NothingIsReadBack() as mode:
            run_micro_batches(engine, micro_batches, loss, counts, StopRequest())
        sdpa = mode.n_operations
        laid_out = [replace(batch, layout=layout_of(batch.spans, "cpu")) for batch in micro_batches]
        with monkeypatch.context() as patch, NothingIsReadBack() as mode:
            patch.setattr("trainer.model.attention._has_flash_attention", lambda _: True)
            patch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
            run_micro_batches(engine, laid_out, loss, counts, StopRequest())
        assert min(sdpa, mode.n_operations) > 500


def test_trained_twice_and_over_a_checkpoint_the_bytes_are_the_same(run_config: TrainerConfig, tmp_path: Path) -> None:
    hashes = []
    for _ in range(2):
        engine = engine_of(run_config)
        hashes.append([])
        for step, batch in enumerate(BATCHES, 1):
            run_step(engine, run_config, batch, step)
            hashes[-1].append(adapter_sha256(engine.policy.weights_bytes()))
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 3

    engine = engine_of(run_config)
    run_step(engine, run_config, BATCHES[0], 1)
    written = save_checkpoint(
        tmp_path,
        state_of(engine),
        engine.policy.weights_bytes(),
        engine.policy.files(),
        engine.optimizer_state(),
    )
    resumed = engine_of(run_config)
    found = Checkpoint.read(written.folder)
    resumed.restore(found.weights(), found.optimizer())
    for step in (2, 3):
        run_step(resumed, run_config, BATCHES[step - 1], step)
    assert adapter_sha256(resumed.policy.weights_bytes()) == hashes[0][-1]


def state_of(engine: TrainingEngine, step: int = 1) -> CheckpointState:
    return CheckpointState(
        run_id="run",
        policy="tiny",
        step=step,
        attempt=1,
        plan_id="p",
        owner="owner",
        manifest_digest="m",
        low_water={0: 8},
        adapter_sha256=adapter_sha256(engine.policy.weights_bytes()),
        optimizer_steps=engine.optimizer_state().steps,
        metrics={},
        seconds={},
    )


def test_a_checkpoint_that_was_changed_is_refused_and_old_ones_go(run_config: TrainerConfig, tmp_path: Path) -> None:
    engine = engine_of(run_config)
    run_step(engine, run_config, BATCHES[0])
    parts = engine.policy.weights_bytes(), engine.policy.files(), engine.optimizer_state()
    written = [save_checkpoint(tmp_path, state_of(engine, step), *parts) for step in range(4)]
    (tmp_path / ".000009-001-x.half").mkdir()
    remove_checkpoints(written[:2])
    remove_leftovers(tmp_path)
    assert [c.state.step for c in read_checkpoints(tmp_path)] == [3, 2]
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["0", "0"]
    weights = written[3].folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(BadCheckpoint, match="another sha256"):
        written[3].weights()


def test_leftovers_that_another_process_removes_at_the_same_time_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".000009-001-x.half"
    write_folder(folder, {"a": b"1", "b": b"2"})
    unlink = os.unlink

    def removed_before(*args: Any, **options: Any) -> None:
        unlink(*args, **options)
        unlink(*args, **options)

    monkeypatch.setattr(os, "unlink", removed_before)
    remove_leftovers(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "no-files"])
def test_a_checkpoint_with_an_empty_state_is_damaged_and_blocks_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "000003-001-x").mkdir()
    path = tmp_path / "000003-001-x" / "state.json"
    path.write_text(content)
    if content == "no-files":
        state = CheckpointState(
            run_id="run", policy="tiny", step=3, attempt=1, plan_id="p", owner="x", manifest_digest="m", low_water={},
            adapter_sha256="a", optimizer_steps=3, metrics={}, seconds={},
        )  # fmt: skip
        path.write_text(state.model_dump_json())
        with pytest.raises(BadCheckpoint, match="names no adapter_model"):
            Checkpoint.read(path.parent).verify()
    else:
        damaged: list[BadCheckpoint] = []
        assert read_checkpoints(tmp_path, damaged) == [] and len(damaged) == 1


def test_a_checkpoint_is_read_back_before_anything_is_said_of_it(
    run_config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(run_config)
    run_step(engine, run_config, BATCHES[0])

    def damaged(folder: Path, files: dict[str, bytes]) -> None:
        write_folder(folder, files | {OPTIMIZER_FILE: files[OPTIMIZER_FILE][:-1] + b"x"})

    monkeypatch.setattr("trainer.run.checkpoint.write_folder", damaged)
    parts = engine.policy.weights_bytes(), engine.policy.files(), engine.optimizer_state()
    with pytest.raises(BadCheckpoint, match=f"{OPTIMIZER_FILE} has another sha256"):
        save_checkpoint(tmp_path, state_of(engine), *parts)


def test_micro_batches_change_the_weights_by_rounding_only(run_config: TrainerConfig) -> None:
    engines = [engine_of(run_config) for _ in range(2)]
    for engine, tokens in zip(engines, (16, 10_000), strict=True):
        run_step(engine, run_config, BATCHES[0], tokens=tokens)
    for (name, one), (_, other) in zip(*(e.policy.trained_parameters() for e in engines), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)


def test_the_first_step_on_its_own_samples_has_ratio_one_and_no_divergence(run_config: TrainerConfig) -> None:
    engine = engine_of(run_config)
    batch = []
    for r in rollouts(1, 4):
        (example,) = examples([r])
        with torch.no_grad():
            logprobs = engine.policy(pack_examples([example])).logprobs
        response = example.token_ids[example.trained_indices].tolist()
        prompt = example.token_ids[: -len(response)].tolist()
        statistics = {"reward": r.reward, "n": 4, "rewards": [0.0, 1.0, r.reward or 0.0]}
        batch.append(
            rollout("own", r.sample_index, prompt=prompt, response=response, sampler=logprobs.tolist(), **statistics)
        )
    metrics = run_step(engine, run_config, batch).metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["rl_clip_fraction"] == 0.0
    assert metrics["grad_norm"] > 0.0


def test_the_metrics_of_a_step_are_those_of_its_rollouts(run_config: TrainerConfig) -> None:
    """Each by its definition, over tokens whose ratios to the sampler are known."""
    engine = engine_of(run_config)
    log_ratios = {"g/0": [0.5, 0.1, -0.5], "g/1": [-0.4, 0.0, 0.4], "c/0": [0.2, -0.3, 0.3]}
    ahead = {"g/1": [0.4, -0.2, 3.0], "c/0": [-0.5, 0.6, 0.1]}  # the teacher of the sampler
    batch, entropies = [], []
    for key, ratios in log_ratios.items():
        task, _, index = key.partition("/")
        (example,) = examples([rollout(task, int(index))])
        with torch.no_grad():
            scores = engine.policy(pack_examples([example]))
        sampler = (scores.logprobs - torch.tensor(ratios)).tolist()
        teacher = [mu + d for mu, d in zip(sampler, ahead[key], strict=True)] if key in ahead else None
        group: dict[str, Any] = {"reward": 1.0 - int(index), "rewards": [1.0, 0.0], "n": 2}
        more: dict[str, Any] = group if task == "g" else {"reward": None}
        batch.append(rollout(task, int(index), sampler=sampler, teacher=teacher, version=int(index), **more))
        entropies += scores.entropies.tolist()
    metrics = run_step(engine, run_config, batch, step=3).metrics
    ratio = torch.tensor(list(log_ratios.values())).exp().flatten()
    expected = {
        "rollouts": 3.0,
        "trained_rollouts": 3.0,
        "tokens": 21.0,
        "rl_tokens": 6.0,
        "opd_tokens": 6.0,
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "rl_advantage_abs": 0.5,
        "opd_advantage_abs": (0.4 + 0.2 + 1.0 + 0.5 + 0.6 + 0.1) / 6,
        # Out of [0.8, 1.28], on the side that the advantage pulls to.
        "rl_clip_fraction": 2 / 6,
        "opd_clip_fraction": 2 / 6,
        "ratio_mean": float(ratio.mean()),
        "effective_sample_size": float(ratio.sum() ** 2 / (9 * ratio.square().sum())),
        "logprob_gap": float(ratio.log().abs().mean()),
        "mismatch_kl": float((ratio - 1 - ratio.log()).mean()),
        "entropy": sum(entropies) / 9,
        "staleness_mean": (2 + 1 + 2) / 3,
        "staleness_1": 1.0,
        "staleness_2": 2.0,
        "joined_rl": 1.0,
        "joined_opd": 1.0,
        "joined_both": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def trained_bytes(run_config: TrainerConfig, rewards: list[float], baseline: float | None) -> bytes:
    """The adapter after a step on single answers whose plan has a baseline."""
    engine = engine_of(run_config)
    batch = {each.key: each for each in (rollout(f"t{i}", reward=reward) for i, reward in enumerate(rewards))}
    plan = plan_for(list(batch.values())).model_copy(update={"baseline": baseline})
    metrics = train_step(engine, plan, 0, batch, run_config.loss, ranks.join_ranks(), StopRequest()).metrics
    assert (metrics["single_answers"], metrics["single_rewards"]) == (len(rewards), sum(rewards))
    return engine.policy.weights_bytes()


def test_a_step_compares_single_answers_with_the_baseline_of_its_plan(run_config: TrainerConfig) -> None:
    compared = trained_bytes(run_config, [1.0, 0.5], 0.25)
    assert compared == trained_bytes(run_config, [0.75, 0.25], None)
    assert compared != trained_bytes(run_config, [1.0, 0.5], None)
    off = run_config.model_copy(update={"loss": run_config.loss.model_copy(update={"baseline_decay": None})})
    assert trained_bytes(off, [1.0, 0.5], 0.25) == trained_bytes(off, [1.0, 0.5], None)


def test_a_step_sums_the_rewards_for_the_next_baseline_as_they_are_compared(run_config: TrainerConfig) -> None:
    """With the punishment of a long answer, from which the baseline is subtracted."""
    overlong = run_config.loss.overlong.model_copy(update={"length": 3, "buffer": 2})
    punished = run_config.model_copy(update={"loss": run_config.loss.model_copy(update={"overlong": overlong})})
    metrics = run_step(engine_of(punished), punished, [rollout(f"t{i}", reward=0.5) for i in range(2)]).metrics
    assert (metrics["single_answers"], metrics["single_rewards"], metrics["reward_mean"]) == (2.0, -1.0, 0.5)


def test_a_step_says_at_which_rate_it_was_made(run_config: TrainerConfig) -> None:
    warming = run_config.model_copy(update={"optimizer": run_config.optimizer.model_copy(update={"warmup_steps": 4})})
    engine = engine_of(warming)
    rates = [run_step(engine, warming, BATCHES[0], step).metrics["learning_rate"] for step in (1, 2)]
    assert rates == [0.0025, 0.005]


def test_a_batch_without_any_advantage_warns_and_leaves_the_adapter(
    run_config: TrainerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(run_config)
    before = engine.policy.weights_bytes()
    metrics = run_step(
        engine, run_config, [rollout("g", i, reward=1.0, rewards=[1.0, 1.0], n=2) for i in range(2)]
    ).metrics
    assert metrics["trained_rollouts"] == 0.0
    assert metrics["reward_mean"] == 1.0
    assert "no rollout has an advantage" in caplog.text
    assert engine.policy.weights_bytes() == before


def with_loss(run_config: TrainerConfig, **loss: Any) -> TrainerConfig:
    return config(Path(run_config.base_model), loss=loss)


@pytest.mark.parametrize(
    ("settings", "teacher", "names"),
    [
        ({"rl_weight": 0.0}, None, ("rl_loss", "rl_clip_fraction")),
        ({"opd_weight": 0.0, "advantage": "binary"}, [-1.0, -2.0, -3.0], ("opd_loss", "opd_clip_fraction")),
    ],
    ids=["rl", "opd"],
)
def test_a_part_of_weight_0_is_not_computed_and_a_batch_of_nothing_else_warns(
    run_config: TrainerConfig,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    teacher: list[float] | None,
    names: tuple[str, ...],
) -> None:
    """A run of one part over rollouts of the other trains nothing, and shows that instead of healthy shares."""
    weightless = with_loss(run_config, **settings)
    engine = engine_of(weightless)
    before = engine.policy.weights_bytes()
    reward = 1.0 if teacher is None else None
    metrics = run_step(engine, weightless, [rollout(f"t{i}", reward=reward, teacher=teacher) for i in range(2)]).metrics
    assert (metrics["rollouts"], metrics["trained_rollouts"], metrics["positions"]) == (2.0, 0.0, 0.0)
    assert "a weight of 0); it trains nothing" in caplog.text
    assert engine.policy.weights_bytes() == before
    mixed = [rollout("both", reward=1.0, teacher=[-1.0, -2.0, -3.0])]
    outcome = run_step(engine, weightless, mixed).metrics
    assert outcome["trained_rollouts"] == 1.0 and [outcome[name] for name in names] == [0.0, 0.0]


def test_the_pull_of_the_masked_loss_holds_without_any_advantage_too(run_config: TrainerConfig) -> None:
    """Answers of equal rewards, by a sampler that is somewhere else."""
    masked = with_loss(run_config, kind="masked", mask_kl=0.1)
    engine = engine_of(masked)
    batch = [rollout("g", i, reward=1.0, rewards=[1.0, 1.0], n=2) for i in range(2)]
    metrics = run_step(engine, masked, batch).metrics
    assert metrics["trained_rollouts"] == 2.0 and metrics["rl_loss"] > 0.0 and metrics["grad_norm"] > 0.0


def test_a_gradient_that_is_not_finite_updates_nothing(run_config: TrainerConfig) -> None:
    engine = engine_of(run_config)
    before = engine.policy.weights_bytes()
    engine.backward(engine.zero_loss() * float("inf"))
    with pytest.raises(TrainingDiverged, match="not finite"):
        engine.step(1)
    assert engine.policy.weights_bytes() == before


def test_a_stop_between_micro_batches_leaves_the_adapter(run_config: TrainerConfig) -> None:
    engine, stop = engine_of(run_config), StopRequest()
    before = engine.policy.weights_bytes()
    stop.request()
    plan = plan_for(BATCHES[0])
    with pytest.raises(StopRequested):
        train_step(engine, plan, 0, {r.key: r for r in BATCHES[0]}, run_config.loss, ranks.join_ranks(), stop)
    assert engine.policy.weights_bytes() == before


def test_the_initial_adapter_is_the_base_model_and_depends_on_the_seed_alone(run_config: TrainerConfig) -> None:
    tokens = canary_tokens(64)
    made = [
        LoraPolicy(Path(run_config.base_model), "b", run_config.lora, seed, "cpu", torch.float32) for seed in (0, 0, 1)
    ]
    assert made[0].weights_bytes() == made[1].weights_bytes() != made[2].weights_bytes()
    assert torch.equal(made[0].token_logprobs(tokens), made[2].token_logprobs(tokens))
    assert float(made[0].token_logprobs(tokens)[0]) == 0.0


def test_checkpointed_layers_give_the_same_bytes(run_config: TrainerConfig) -> None:
    engines = [engine_of(config(Path(run_config.base_model), gradient_checkpointing=on)) for on in (False, True)]
    (example,) = examples(BATCHES[0][:1])
    kept: list[int] = []
    for engine in engines:
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            engine.policy(pack_examples([example]))
        kept.append(sum(sizes))
        run_step(engine, run_config, BATCHES[0])
    assert kept[1] < kept[0] / 2
    assert engines[0].policy.weights_bytes() == engines[1].policy.weights_bytes()


def test_a_run_goes_on_from_an_adapter_in_a_folder(run_config: TrainerConfig, tmp_path: Path) -> None:
    trained = engine_of(run_config)
    run_step(trained, run_config, BATCHES[0])
    (tmp_path / "adapter_model.safetensors").write_bytes(trained.policy.weights_bytes())
    (tmp_path / "adapter_config.json").write_bytes(trained.policy.files().others["adapter_config.json"])
    goes_on = {"initial_adapter": str(tmp_path)}
    engine = engine_of(config(Path(run_config.base_model), **goes_on))
    assert engine.load_initial_weights() == engine.policy.weights_bytes() == trained.policy.weights_bytes()
    with pytest.raises(BadAdapter, match=r"has lora_alpha 8.*, but the run has 16"):
        engine_of(config(Path(run_config.base_model), **goes_on, lora={"rank": 4, "alpha": 16})).load_initial_weights()
    engine = engine_of(config(Path(run_config.base_model), initial_adapter=str(tmp_path / "none")))
    engine.restore(trained.policy.weights_bytes(), trained.optimizer_state())  # what has a checkpoint needs no folder
    with pytest.raises(BadAdapter, match="no adapter in"):
        engine.load_initial_weights()


@pytest.mark.parametrize("damaged", [False, True])
def test_an_initial_adapter_of_another_base_model_is_refused(
    damaged: bool, run_config: TrainerConfig, tmp_path: Path
) -> None:
    """A restart does not repair it."""
    deeper = engine_of(config(tiny_model(tmp_path / "deeper", layers=3)))
    weights = b"no safetensors" if damaged else deeper.policy.weights_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    (tmp_path / "adapter_config.json").write_bytes(deeper.policy.files().others["adapter_config.json"])
    engine = engine_of(config(Path(run_config.base_model), initial_adapter=str(tmp_path)))
    with pytest.raises(BadAdapter, match=r"initial_adapter: .* does not fit"):
        engine.load_initial_weights()


def test_a_run_begins_with_what_its_seed_draws_whatever_was_trained_before(run_config: TrainerConfig) -> None:
    engine = engine_of(run_config)
    drawn = engine.policy.weights_bytes()
    run_step(engine, run_config, BATCHES[0])
    assert engine.policy.weights_bytes() != drawn
    assert engine.load_initial_weights() == engine.policy.weights_bytes() == drawn


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "lm_head"], "lm_head is the model's head, which stays frozen"),
        (
            ["q_proj", "query"],
            "query names no linear layer of this model. Name some of down_proj, .* or set all-linear",
        ),
        (["embed_tokens"], "embed_tokens names no linear layer"),
        (["self_attn"], "self_attn names no linear layer"),
    ],
)
def test_a_target_that_would_not_be_trained_is_refused(
    run_config: TrainerConfig, targets: list[str], message: str
) -> None:
    lora = {"rank": 4, "alpha": 8, "targets": targets}
    with pytest.raises(BadTargets, match=rf"lora\.targets: {message}"):
        engine_of(config(Path(run_config.base_model), lora=lora))


def test_only_the_targets_are_adapted(run_config: TrainerConfig) -> None:
    adapted = config(Path(run_config.base_model), lora={"rank": 4, "alpha": 8, "targets": ["q_proj", "mlp.down_proj"]})
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in engine_of(adapted).policy.trained_parameters()}
    assert names == {"q_proj", "down_proj"}


def test_the_rate_of_a_step_is_the_schedules(run_config: TrainerConfig) -> None:
    """AdamW's first update has the size of the rate whatever the gradient."""
    options = {"lr": 0.01, "schedule": "linear", "warmup_steps": 2, "decay_steps": 4}
    scheduled = config(Path(run_config.base_model), optimizer=options)
    moved = []
    for step in (1, 2, 4):
        engine = engine_of(scheduled)
        before = [parameter.detach().clone() for _, parameter in engine.policy.trained_parameters()]
        run_step(engine, scheduled, BATCHES[0], step)
        after = [parameter.detach() for _, parameter in engine.policy.trained_parameters()]
        moved.append(max(float((new - old).abs().max()) for new, old in zip(after, before, strict=True)))
    assert moved == pytest.approx([0.005, 0.01, 0.0], rel=1e-3)
