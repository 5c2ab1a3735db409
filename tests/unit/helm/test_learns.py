"""`helm test` passes when a step trained on a rollout of its own tasks, and not before."""

import importlib.util
import itertools
from types import ModuleType
from typing import Any

import pytest

from schemas.records import Record
from tests.support.loop_records import ack, manifest, outcome, plan, step_result, task, update
from tests.unit.helm.chart import CHART


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learns", CHART / "files" / "learns.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def progress(script: ModuleType, *records: Record) -> Any:
    made = script.Progress("run-1", "assistant")
    for record in records:
        made.apply(record)
    return made


def test_an_adapter_counts_once_plan_step_and_update_are_there_in_any_order(script: ModuleType) -> None:
    mine = f"{script.PREFIX}0/3"
    needed = (plan(2, ["other/0", mine]), step_result(2, 3), update(3))
    for order in itertools.permutations(needed):
        assert [(rollout, found.version) for rollout, found in progress(script, *order).learned()] == [(mine, 3)]
    for missing in needed:
        assert list(progress(script, *(each for each in needed if each is not missing)).learned()) == []


def test_rollouts_of_others_and_runs_of_others_do_not_count(script: ModuleType) -> None:
    step = (step_result(2, 3), update(3))
    assert list(progress(script, plan(2, ["t0/0"]), *step).learned()) == []
    mine = plan(2, [f"{script.PREFIX}0/0"], run_id="run-2")
    assert list(progress(script, mine, *step).learned()) == []


def test_a_run_that_a_rollback_began_is_the_same_run(script: ModuleType) -> None:
    mine = f"{script.PREFIX}0/0"
    branch = (plan(1, [mine], "run-1.1"), step_result(1, 5, "run-1.1"), update(5, run_id="run-1.1", step=1))
    assert [found.version for _, found in progress(script, *branch).learned()] == [5]


def test_it_knows_the_size_of_a_batch_and_what_is_served(script: ModuleType) -> None:
    found = progress(script, manifest(batch=4), ack(1), ack(2, ok=False), outcome(task(f"{script.PREFIX}0")))
    assert (found.batch_rollouts, found.served, len(found.rollouts)) == (4, {1}, 1)


@pytest.mark.parametrize(
    ("environments", "chosen"), [(["chat"], "chat"), (["toolcall", "math", "chat"], "math"), (["toolcall"], None)]
)
def test_it_asks_in_the_first_environment_for_which_it_has_a_question(
    script: ModuleType, capsys: pytest.CaptureFixture[str], environments: list[str], chosen: str | None
) -> None:
    command = ["--policy=assistant", "--run=run-1", *(f"--environment={each}" for each in environments)]
    if chosen is not None:
        assert script.arguments(command).environment == chosen
        return
    with pytest.raises(SystemExit):
        script.arguments(command)
    assert "worker.environments has toolcall, and this test asks in chat or math" in capsys.readouterr().err


def test_its_tasks_name_a_verifier_that_scoring_has(script: ModuleType) -> None:
    from tentalis.rewards.registry import check

    for environment in ("chat", "math"):
        made = script.task(0, "assistant", environment)
        assert made.n_samples == script.SAMPLES
        check(made)
