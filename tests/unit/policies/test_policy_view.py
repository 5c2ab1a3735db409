"""The output of `tentalis policy` about the versions on the log."""

from pathlib import Path

import pytest

from schemas.records import EvalResult, Pin
from tentalis.cli.policy import _trainable
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.output import detail_rows
from tentalis.policies.guard import CANDIDATE
from tentalis.policies.view import PolicyView, UnknownVersion
from tentalis.service.settings import Settings
from tests.support.loop_records import T0, ack, manifest, promotion, step_result, update


def pin(version: int, pinned: bool = True) -> Pin:
    return Pin(policy="assistant", version=version, event_time=T0, pinned=pinned)


def verdict(version: int, passed: bool, **metrics: float) -> EvalResult:
    return EvalResult(
        eval_id=f"e{version}",
        event_time=T0,
        experiment=CANDIDATE,
        scenario="run-1",
        policy=f"assistant@v{version}",
        passed=passed,
        metrics=metrics,
        details="" if passed else "one word",
    )


def view() -> PolicyView:
    """v0..v3 of run-1; v3 refused; rolled back to v1, from which run-1.1 goes on as v4 and v5."""
    made = PolicyView()
    branch = manifest("run-1.1", first=4).model_copy(
        update={"parent_run": "run-1", "parent_step": 1, "config": "steps: 9\nbatch_rollouts: 4\noptimizer: {lr: 1}\n"}
    )
    for record in (
        manifest(first=0),
        branch,
        verdict(2, True),
        verdict(3, False, length=1.0),
        verdict(5, True, length=9),
    ):
        made.apply(record)
    for version in range(4):
        made.apply(step_result(version, version, metrics={"reward_mean": version / 10}))
        made.apply(update(version, step=version, sha256=f"s{version}"))
    for version in (0, 1, 2):
        made.apply(promotion(version, "guarded", f"s{version}"))
    made.apply(promotion(1, "rollback", "s1"))
    made.apply(update(4, run_id="run-1.1", step=0, sha256="s1"))
    made.apply(promotion(4, "guarded", "s1"))
    made.apply(update(5, run_id="run-1.1", step=1, sha256="s5"))
    made.apply(step_result(1, 5, "run-1.1", metrics={"reward_mean": 0.5}))
    for record in (ack(4), ack(5, ok=False, server_id="far"), ack(4, server_id="far"), pin(0), pin(2), pin(2, False)):
        made.apply(record)
    return made


def test_every_version_is_listed_with_what_became_of_it() -> None:
    rows = list(view().rows(None, T0))
    assert [(row["version"].partition("@")[2], row["state"], row["guard"]) for row in rows] == [
        ("v5", "candidate", "passed"),
        ("v4", "promoted", None),
        ("v3", "refused", "refused"),
        ("v2", "abandoned", "passed"),
        ("v1", "past", None),
        ("v0", "past", None),
    ]
    assert [row["served_by"] for row in rows] == [None, "far,local", None, None, None, None]
    assert rows[0]["cannot_serve"] == "far", "a failed canary is told, although the old version goes on"
    assert [row["pinned"] for row in rows] == [False, False, False, False, False, True]


def test_a_version_is_shown_with_its_reasons() -> None:
    of = view()
    details = of.details(of.find("assistant"))
    assert (details["version"], details["parent"]) == ("assistant@v4", "run-1@1")
    assert of.details(of.find("assistant@v5"))["refusals"] == {"far": "bad"}
    refused = of.details(of.find("assistant@v3"))
    assert refused["verdict"] == {"reasons": "one word", "metrics": {"length": 1.0}}
    with pytest.raises(UnknownVersion, match="the newest is assistant@v5"):
        of.find("assistant@v9")
    with pytest.raises(UnknownVersion, match="published policies: assistant"):
        of.find("math")


def test_two_versions_are_compared_by_steps_settings_and_metrics() -> None:
    of = view()
    found = of.difference(of.find("assistant@v3"), of.find("assistant@v5"))
    assert (found["steps_between"], found["same_weights"]) == (3, False), "two back to v1, one on"
    assert found["metrics"] == {"guard_length": [1.0, 9.0], "reward_mean": [0.3, 0.5]}
    assert found["config"] == {"max_staleness": [0, None], "optimizer.lr": [None, 1], "steps": [3, 9]}
    assert of.difference(of.find("assistant@v1"), of.find("assistant@v4"))["same_weights"]


def test_a_rollback_by_itself_goes_to_what_was_served_before_and_not_abandoned() -> None:
    assert view().before("assistant").name == "assistant@v0", "v4 has the weights of v1, and v2 was abandoned"
    with pytest.raises(UnknownVersion, match="name the version"):
        view().before("math")


def test_people_read_times_and_programs_numbers() -> None:
    of = view()
    details = of.details(of.find("assistant@v1")) | {"published": 1_700_000_000_000}
    details["promotions"][0]["at"] = 1_700_000_001_999
    lines = dict(detail_rows(details))
    assert lines["published"] == "2023-11-14T22:13:20Z"
    assert lines["promotions.0.at"] == "2023-11-14T22:13:21Z"
    assert details["published"] == 1_700_000_000_000


def test_a_version_that_nothing_can_be_trained_on_from_is_no_place_to_roll_back_to(tmp_path: Path) -> None:
    of, settings = view(), Settings(bootstrap="-", home=tmp_path, cache=tmp_path)
    _trainable(settings, of, of.find("assistant@v1"))
    of.apply(update(6, run_id="run-2", step=0, rank=99))
    with pytest.raises(CommandError, match=r"cannot continue from assistant@v1.*policy promote assistant@v1"):
        _trainable(settings, of, of.find("assistant@v1"))
    _trainable(settings, of, of.find("assistant@v6"))
    (tmp_path / "checkpoints" / "run-2").mkdir(parents=True)
    with pytest.raises(CommandError, match="no checkpoint of its step"):
        _trainable(settings, of, of.find("assistant@v6"))
