"""The changes that a counterfactual may make, its name, and its page. Nothing is trained here."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.records import BatchPlan, Rollout, RunManifest
from schemas.wire.codec import Codec
from tentalis.service.settings import Settings
from tests.support import loop_records
from tests.support.trainer_lab import config, rollout, rollouts
from tests.unit.trainer.test_step import plan_for
from trainer.advantages.baseline import RunningBaseline
from trainer.config.file import parse_config
from trainer.config.loss import LossConfig, OverlongConfig
from trainer.config.trainer_config import ConfigError, config_text
from trainer.replay import counterfactual
from trainer.replay.changed_baselines import ChangedLoss, with_changed_baselines
from trainer.replay.compare import AdapterDistance
from trainer.replay.compare_report import comparison_json, html_page, write_report
from trainer.replay.counterfactual import CounterfactualPair, RunComparison, _record, _variants, whole_groups
from trainer.replay.job import ReplayJobResult
from trainer.replay.recording import CannotReplay, RunRecording
from trainer.run.checkpoint import Checkpoint, CheckpointState
from trainer.run.run_log import RunLog


def manifest(**more: object) -> RunManifest:
    run_config = config(Path("model"), run_id="run-7", policy="tiny", **more)
    of_a_run = loop_records.manifest("run-7", first=3)
    return of_a_run.model_copy(update={"digest": "d", "policy": "tiny", "config": config_text(run_config)})


def test_it_is_a_run_of_its_own_named_by_what_was_changed() -> None:
    ((variant,), _) = _variants([manifest()], {"optimizer.lr": "0.5"}, 2)
    ((same,), _) = _variants([manifest()], {"lr": "5e-1"}, 2)
    ((other,), _) = _variants([manifest()], {"lr": "0.25"}, 2)
    assert variant.manifest.run_id == same.manifest.run_id != other.manifest.run_id
    assert variant.manifest.run_id.startswith("run-7.cf-") and variant.manifest.policy.startswith("tiny.cf-")
    assert (variant.manifest.parent_run, variant.manifest.parent_step, variant.manifest.first_version) == (
        "run-7",
        2,
        3,
    )
    assert parse_config(variant.manifest.config, "x") == variant.config
    assert (variant.config.optimizer.lr, variant.config.run_id, variant.recorded_config.optimizer.lr) == (
        0.5,
        variant.manifest.run_id,
        0.01,
    )


def test_that_of_a_branch_begins_with_what_the_branch_began_with() -> None:
    ((variant,), _) = _variants([manifest()], {"lr": "0.5"}, 0)
    assert variant.manifest.parent_step is None, "its first adapter is its own"
    branch = manifest().model_copy(update={"parent_run": "run-6", "parent_step": 5})
    ((variant,), _) = _variants([branch], {"lr": "0.5"}, 0)
    assert (variant.manifest.parent_run, variant.manifest.parent_step) == ("run-7", 0)


def test_its_device_is_the_recorded_one_unless_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    ((variant,), _) = _variants([manifest(device="auto")], {"lr": "0.5"}, 0)
    assert variant.manifest.device == "cpu"
    on_a_gpu = manifest(device="auto").model_copy(update={"device": "cuda"})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    ((variant,), _) = _variants([on_a_gpu], {"device": "cpu"}, 0)
    assert variant.manifest.device == "cpu"
    with pytest.raises(CannotReplay, match="is trained on GPUs, 1 of them, and torch finds 0 on this machine"):
        _variants([on_a_gpu], {"lr": "0.5"}, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_rollouts": "4"}, "--set: batch_rollouts cannot be changed: the recorded plans are executed"),
        ({"policy": "else"}, "--set: policy cannot be changed"),
        ({"run_id": "else"}, "--set: run_id cannot be changed"),
        ({"lr": "0.01"}, "changes nothing"),
        ({"optimizer.lrr": "1"}, "optimizer.lrr: no such setting, did you mean lr?"),
    ],
)
def test_what_it_cannot_change(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=r"--set") as error:
        _variants([manifest()], changes, 0)
    assert message in str(error.value)


def test_manifests_that_differ_make_one_counterfactual() -> None:
    variants, _ = _variants([manifest(), manifest(micro_batch_tokens=32)], {"lr": "0.5"}, 0)
    assert len({variant.manifest.run_id for variant in variants}) == 1


def test_what_changes_one_of_the_manifests_is_a_change() -> None:
    both = [manifest(seed=1), manifest(seed=2)]
    (one, other), changed = _variants(both, {"seed": "2"}, 0)
    assert (one.manifest.adapter_seed, other.manifest.adapter_seed) == (2, 2) and changed == {"seed": (1, 2)}
    (third, _), changed = _variants(both, {"seed": "1"}, 0)
    assert changed == {"seed": (2, 1)} and third.manifest.run_id != one.manifest.run_id
    (one, other), _ = _variants(both, {"lr": "0.5"}, 0)
    assert (one.manifest.adapter_seed, other.manifest.adapter_seed) == (1, 1), "the adapter is drawn once"


def recorded(first: RunManifest, second: RunManifest, digests: str, begin: int = 0) -> RunRecording:
    """A run whose steps after `begin` have plans of these manifests."""
    plans = [
        loop_records.plan(step, ["t/0"], "run-7").model_copy(update={"manifest_digest": digest})
        for step, digest in enumerate(digests, begin + 1)
    ]
    results = tuple(loop_records.step_result(step, step) for step in range(begin, begin + len(digests) + 1))
    run = RunLog("run-7", "tiny", {first.digest: first, second.digest: second})
    beginning = None
    if begin:
        state = CheckpointState.model_construct(run_id="run-7", step=begin)
        beginning = Checkpoint.model_construct(folder=Path(), state=state)
    return RunRecording(run, results, tuple(plans), beginning, (), {}, begin + len(digests) + 1)


@pytest.mark.parametrize(
    ("digests", "begin", "expected"),
    [
        ("dded", 0, [("d", 0, [1, 2]), ("e", 2, [3]), ("d", 3, [4])]),
        ("ee", 0, [("d", 0, []), ("e", 0, [1, 2])]),  # changed before step 1: the adapter is the first manifest's
        ("ee", 2, [("e", 2, [3, 4])]),
    ],
)
def test_what_is_trained_begins_as_the_run_began_and_is_in_the_order_of_its_steps(
    digests: str, begin: int, expected: list[tuple[str, int, list[int]]]
) -> None:
    first, second = manifest(), manifest(micro_batch_tokens=32).model_copy(update={"digest": "e"})
    segments = recorded(first, second, digests, begin).segments()
    assert [(each.digest, start, [p.step for p in plans]) for each, start, plans in segments] == expected


def test_what_is_recorded_is_written_once_and_at_the_recorded_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two manifests that differ in what is changed become one."""
    first = manifest(seed=1)
    second = manifest(seed=2).model_copy(update={"digest": "e", "event_time": first.event_time + 1})
    recording = recorded(first, second, "ee")
    variants, _ = _variants([first, second], {"seed": "3"}, 0)
    sent: list[Any] = []
    publisher = SimpleNamespace(send=lambda _, record: sent.append(record), flush=lambda: None)
    monkeypatch.setattr(counterfactual, "Publisher", lambda *_: publisher)
    done = ReplayJobResult(sha256={0: "a", 1: "b", 2: "c"}, metrics={}, checkpoint=Path())
    _record(recording, variants, done, Settings(), Codec(), 0)
    assert [type(each).__name__ for each in sent] == ["RunManifest", *["BatchPlan"] * 2, *["StepResult"] * 3]
    assert len({each.key for each in sent}) == 6 and {each.event_time for each in sent} == {first.event_time}
    assert {plan.manifest_digest for plan in sent[1:3]} == {sent[0].digest}
    assert [result.plan_id for result in sent[3:]] == [None, *(plan.plan_id for plan in sent[1:3])]


def test_the_report_in_a_terminal_is_whole_in_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"reward_mean": -0.31163, "rl_loss": -0.041877, "opd_loss": -0.012934, "grad_norm": 0.81746}
    distance = AdapterDistance(0.53462, 0.99)
    pairs = tuple(CounterfactualPair(step, metrics, dict(metrics), "a", "b", 8.07e-3, distance) for step in (1, 1000))
    write_report(
        RunComparison("r.cf-1", "r", 0, "p.cf-1", {"optimizer.lr": (0.01, 0.0001)}, pairs, tmp_path), emit=None
    )
    lines = capsys.readouterr().out.splitlines()
    numbers = ["-0.3116", "-0.04188", "-0.01293", "0.8175"]
    assert ["1000", "recorded", *numbers] in [line.split() for line in lines]
    assert ["changed", *numbers, "8.07e-03", "0.5346", "(99%)"] in [line.split() for line in lines]


def test_the_page_is_one_file_and_escapes_what_it_shows(tmp_path: Path) -> None:
    def pair(step: int) -> CounterfactualPair:
        return CounterfactualPair(
            step, {"rl_loss": 1.0, "reward_mean": 0.5}, {"rl_loss": float(step)}, "a", "b", 0.1, distance
        )

    distance = AdapterDistance(0.5, float("nan"))
    run_config = RunComparison(
        "r.cf-1", "r<b>", 0, "p.cf-1", {"lora.targets": ("all", "<i>")}, (pair(1), pair(2)), tmp_path
    )
    page = html_page(run_config)
    assert "<i>" not in page and "r<b>" not in page and "&lt;i&gt;" in page
    assert page.count("<svg") == 3 and "http" not in page and "<script" not in page
    data = json.loads(json.dumps(comparison_json(run_config)))
    assert data["steps"][0]["adapter_distance_relative"] is None and data["steps"][1]["changed"]["rl_loss"] == 2.0


def test_with_pairs_every_group_is_in_one_micro_batch() -> None:
    """A run without a loss on pairs may divide its groups; both sides of a pair need one forward pass."""
    made = rollouts(2, 4)
    divided = plan_for(made, micro_batch_tokens=16)
    present = {r.key: r for r in made}
    whole = whole_groups(divided, present, 16)

    def places(plan: BatchPlan) -> dict[str, set[tuple[int, int]]]:
        found: dict[str, set[tuple[int, int]]] = {}
        for row in plan.rows:
            found.setdefault(present[row.rollout_id].head.task_id, set()).add((row.rank, row.micro_batch))
        return found

    assert max(map(len, places(divided).values())) > 1, "else nothing is shown"
    assert all(len(where) == 1 for where in places(whole).values())
    assert [row.rollout_id for row in whole.rows] == [row.rollout_id for row in divided.rows]


def conversation(rewards: Sequence[Sequence[float]], begin: int = 0, baselines: bool = False) -> RunRecording:
    """A run of single answers, with a step for each list of rewards. `baselines`: it was trained with them."""
    plans, results, baseline = [], [loop_records.step_result(begin, begin)], RunningBaseline()
    for step, given in enumerate(rewards, begin + 1):
        rows = plan_for(answers(step, given)).rows
        plan = loop_records.plan(step, [], "run-7").model_copy(update={"manifest_digest": "d", "rows": rows})
        plans.append(plan.model_copy(update={"baseline": baseline.mean if baselines else None}))
        baseline = baseline.after({"single_rewards": sum(given), "single_answers": len(given)}, 0.9)
        results.append(loop_records.step_result(step, step))
    run = RunLog("run-7", "tiny", {"d": manifest()})
    return RunRecording(run, tuple(results), tuple(plans), None, (), {}, begin + len(plans) + 1)


def answers(step: int, rewards: Sequence[float]) -> list[Rollout]:
    return [rollout(f"t{step}-{i}", reward=reward) for i, reward in enumerate(rewards)]


REWARDS = ([1.0, 0.5], [0.0, 0.5], [0.5, 0.5])


def with_baselines(recording: RunRecording, recorded_loss: LossConfig, changed: LossConfig) -> list[float | None]:
    present = {r.key: r for step, given in enumerate(REWARDS, recording.plans[0].step) for r in answers(step, given)}
    losses = {"d": ChangedLoss(recorded_loss, changed)}
    return [plan.baseline for plan in with_changed_baselines(recording, losses, lambda rows: present).plans]


def test_baselines_that_are_switched_on_are_those_of_the_steps_before() -> None:
    """The plans of a run without baselines record none, and its counterfactual was trained on the rewards themselves
    without a word."""
    off, on = LossConfig(baseline_decay=None), LossConfig(baseline_decay=0.5)
    found = with_baselines(conversation(REWARDS), off, on)
    assert found == [None, 0.75, pytest.approx((0.5 * 1.5 + 0.5) / (0.5 * 2.0 + 2.0))]
    recorded_plans = conversation(REWARDS, baselines=True)
    assert with_baselines(recorded_plans, LossConfig(), on) == found, "another decay"
    shaped = LossConfig(baseline_decay=0.5, overlong=OverlongConfig(length=2, buffer=1))
    assert with_baselines(conversation(REWARDS), on, shaped)[1] == pytest.approx(0.75 - 1.0)


def test_baselines_are_the_recorded_ones_if_nothing_changes_them() -> None:
    recording = conversation(REWARDS, baselines=True)
    for changed in (LossConfig(kind="gspo"), LossConfig(baseline_decay=None)):
        losses = {"d": ChangedLoss(LossConfig(), changed)}
        assert with_changed_baselines(recording, losses, lambda rows: pytest.fail("nothing to read")) is recording


def test_baselines_that_begin_at_a_checkpoint_begin_with_its_sums() -> None:
    off, on = LossConfig(baseline_decay=None), LossConfig(baseline_decay=0.5)
    recording = conversation(REWARDS, begin=4)
    with pytest.raises(CannotReplay, match=r"the results up to step 4 have no sums of rewards.*omit --from-step"):
        with_baselines(recording, off, on)
    metrics = RunningBaseline(3.0, 4.0).metrics()
    first = recording.results[0].model_copy(update={"metrics": metrics})
    found = with_baselines(replace(recording, results=(first, *recording.results[1:])), off, on)
    assert found[:2] == [0.75, pytest.approx((0.5 * 3.0 + 1.5) / (0.5 * 4.0 + 2.0))]
