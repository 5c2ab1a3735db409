"""Assignments: which version answers a task, by worker, environment and share."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.records import Assignment, AssignmentAck, AssignmentScope
from tentalis.policies.assignments import AssignedVersions, Assignments, share_of
from tests.support.loop_records import assignment, assignment_ack, update
from tests.unit.policies.test_policies import Bench
from trainer.run.run_log import RunLog

WORKER, ENVIRONMENT, SHARED = AssignmentScope.WORKER, AssignmentScope.ENVIRONMENT, AssignmentScope.SHARED


def folded(*records: Any) -> AssignedVersions:
    fold = AssignedVersions()
    for record in records:
        fold.apply(record)
    return fold


def chosen(fold: AssignedVersions, unit: str = "t", worker: str = "w", environment: str = "chat", **served: int) -> Any:
    return fold.name(
        "local",
        "assistant",
        served=lambda policy: f"{policy}@v{served[policy]}" if policy in served else None,
        worker_id=worker,
        environment=environment,
        unit=unit,
    )


def test_the_workers_assignment_comes_before_its_environments_and_that_before_the_shared_one() -> None:
    records = [assignment(3, SHARED), assignment(2, ENVIRONMENT, "chat"), assignment(1, WORKER, "w")]
    fold = folded(*records, *(assignment_ack(version) for version in (1, 2, 3)))
    assert chosen(fold) == "assistant@v1"
    assert chosen(fold, worker="other") == "assistant@v2"
    assert chosen(fold, worker="other", environment="math") == "assistant@v3"
    fold.apply(records[2].model_copy(update={"active": False}))
    assert chosen(fold) == "assistant@v2"


def test_an_assignment_is_for_tasks_of_one_policy() -> None:
    fold = folded(assignment(1, WORKER, "w", replaces="other"), assignment_ack(1))
    assert chosen(fold) is None
    fold = folded(assignment(None, WORKER, "w", policy="terse"))
    assert chosen(fold, terse=4) == "terse@v4"
    assert chosen(fold, terse=5) == "terse@v5", "the served version of that policy, as it changes"
    assert chosen(fold) is None, "it is not served: the task's own policy answers"


def test_a_version_that_the_server_does_not_have_is_not_chosen() -> None:
    fold = folded(assignment(7, SHARED))
    assert chosen(fold) is None
    assert chosen(fold, assistant=7) == "assistant@v7", "it is served anyway"
    assert fold.apply(assignment_ack(7, ok=False)) and chosen(fold) is None
    assert fold.apply(assignment_ack(7)) and chosen(fold) == "assistant@v7"
    assert not fold.apply(assignment_ack(7))
    fold.apply(assignment_ack(7, server_id="another", ok=False))
    assert chosen(fold) == "assistant@v7"


def test_a_share_is_decided_by_the_unit_and_a_larger_share_keeps_the_smaller_one() -> None:
    units = [f"task-{i}" for i in range(4000)]
    groups = {}
    for percent in (10.0, 25.0):
        fold = folded(assignment(1, SHARED, percent=percent), assignment_ack(1))
        groups[percent] = {unit for unit in units if chosen(fold, unit) == "assistant@v1"}
        again = {unit for unit in units if chosen(fold, unit) == "assistant@v1"}
        assert again == groups[percent]
        assert abs(len(groups[percent]) / 40 - percent) < 2.5
    assert groups[10.0] < groups[25.0]
    assert share_of("assign/shared//assistant", "task-0") == 9.473
    split = Counter((share_of("a", unit) < 50, share_of("b", unit) < 50) for unit in units)
    assert min(split.values()) > 850, "two assignments split the tasks independently"


def test_what_a_share_leaves_goes_to_the_wider_assignment() -> None:
    fold = folded(assignment(1, WORKER, "w", percent=50.0), assignment(2, SHARED), assignment_ack(1), assignment_ack(2))
    assert {chosen(fold, f"task-{i}") for i in range(50)} == {"assistant@v1", "assistant@v2"}


def test_a_subject_is_named_by_all_scopes_but_shared() -> None:
    for scope, subject in ((SHARED, "w"), (WORKER, "")):
        with pytest.raises(ValidationError, match="subject"):
            assignment(1, scope, subject)
    with pytest.raises(ValidationError, match="percent"):
        assignment(1, SHARED, percent=0.0)
    unknown = assignment(1, SHARED).model_copy(update={"scope": AssignmentScope.UNKNOWN})
    assert Assignment.model_validate(unknown.model_dump()).scope is AssignmentScope.UNKNOWN
    assert not Assignments().apply(unknown), "of a newer version: it has no effect here"


def test_a_server_loads_and_checks_what_is_assigned_beside_what_it_serves(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for version in range(1, 8):
        bench.publish(version, promote=version == 7)
    bench.put(assignment(1, WORKER, "w"))
    bench.round()
    bench.round()
    assert set(bench.server.loaded) == {"assistant@v1", "assistant@v7"}
    assert [(type(each).__name__, each.version, each.ok) for each in bench.acks] == [
        ("PolicyAck", 7, True),
        ("AssignmentAck", 1, True),
    ]
    bench.server.loaded.clear()
    asyncio.run(bench.sync.round())
    assert set(bench.server.loaded) == {"assistant@v1", "assistant@v7"}, "a restarted server gets both back"
    bench.put(assignment(1, WORKER, "w", active=False))
    for version in (3, 4, 5, 6):
        bench.server.loaded[f"assistant@v{version}"] = ""
    bench.round()
    assert "assistant@v1" not in bench.server.loaded, "unloaded with the other old ones"


def test_an_assigned_version_that_cannot_be_loaded_is_reported_and_changes_nothing_else(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish(1)
    bench.publish(2, promote=False, weights=b"damaged")
    bench.put(assignment(2, SHARED))
    bench.put(assignment(9, WORKER, "w"))
    bench.round()
    bench.round()
    assert bench.said() == [(1, True), (2, False), (9, False)]
    refused, unpublished = bench.acks[1:]
    assert isinstance(refused, AssignmentAck) and "is damaged" in str(refused.error)
    assert "was never published" in str(unpublished.error)
    assert bench.sync.problem == "" and bench.log.served_version("assistant") == 1


def test_a_rank_that_the_server_cannot_serve_is_reported_in_its_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.publish(1, promote=False)
    bench.put(assignment(1, SHARED))
    bench.server.refuse_load = "LoRA rank 64 is greater than max_lora_rank 16"
    bench.round()
    (ack,) = bench.acks
    assert not ack.ok and "max_lora_rank 16" in str(ack.error)


def test_the_trainer_keeps_assigned_versions_until_the_assignment_ends() -> None:
    run = RunLog("run", "assistant")
    run.add_record(update(4), 0)
    run.add_record(assignment(4, WORKER, "w"), 1)
    run.add_record(assignment(5, WORKER, "x", policy="other"), 2)
    assert run.protected == {4}
    run.add_record(assignment(None, WORKER, "w"), 3)
    assert run.protected == set(), "the served version is kept in any case"
