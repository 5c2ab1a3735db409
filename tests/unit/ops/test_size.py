"""The capacity calculator gives the numbers of docs/operations/scale.md, and grows with the load."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from schemas import topics
from tentalis.cli.main import app
from tentalis.kafka.topology import APPLICATIONS
from tentalis.ops.size import BadLoad, Load, size_of


def test_ten_thousand_tasks_per_second_need_what_the_page_says() -> None:
    found = size_of(Load(10_000))
    assert found.applications["join"]["cores"] == pytest.approx(3.7, abs=0.05)
    assert (found.applications["join"]["workers"], found.applications["scoring"]["workers"]) == (8, 5)
    assert found.applications["gateway"]["cores"] == pytest.approx(10_000 / 413)
    assert found.applications["gateway"]["workers"] == 41
    assert found.applications["join"]["busy"] == pytest.approx(0.47, abs=0.005)
    assert found.partitions == 24
    by_topic = {each.topic: each for each in found.topics}
    assert {name: round(each.mb_per_second) for name, each in by_topic.items()} == {
        topics.TASKS: 1,
        topics.RESULTS: 122,
        topics.FEEDBACK: 123,
        topics.HALVES: 170,
        "join changelog": 43,
        topics.ROLLOUTS: 120,
        topics.OUTCOMES: 4,
    }
    assert round(by_topic[topics.RESULTS].tb or 0) == 316 and by_topic[topics.ROLLOUTS].tb is None
    totals = found.totals
    assert totals["broker_in_mb_per_second"] == pytest.approx(583, abs=1)
    assert totals["broker_written_mb_per_second"] == pytest.approx(1_750, abs=5)
    assert totals["broker_sent_mb_per_second"] == pytest.approx(2_330, abs=10)
    assert totals["join_open_gb"] == pytest.approx(5.4)
    assert totals["join_open_gb_per_worker"] == pytest.approx(0.7, abs=0.03)
    assert totals["join_closed_gb_in_memory"] == pytest.approx(518, abs=1)
    assert totals["join_closed_gb_on_disk"] == pytest.approx(124, abs=1)
    assert totals["teacher_tokens_per_second"] == pytest.approx(5.3e6)
    assert totals["trainer_tokens_per_second"] == 10e6


@given(st.floats(0.1, 50_000), st.integers(1, 100_000), st.floats(0, 1))
def test_more_load_never_needs_less(rate: float, tokens: int, hints: float) -> None:
    one, more = size_of(Load(rate, tokens, hints)), size_of(Load(2 * rate, tokens + 1, hints))
    assert more.partitions >= one.partitions
    assert all(more.totals[name] >= value for name, value in one.totals.items() if name != "join_open_gb_per_worker")
    for found in (one, more):
        assert found.partitions % found.applications["join"]["workers"] == 0
        assert all(values["busy"] <= 0.6 + 1e-9 for values in found.applications.values())


def test_a_load_beyond_the_figures_and_a_wrong_one_are_refused() -> None:
    with pytest.raises(BadLoad, match="768 partitions"):
        size_of(Load(10_000_000))
    for load in ({"tasks_per_second": 0}, {"tasks_per_second": 1, "tokens": 0}, {"tasks_per_second": 1, "hints": 2}):
        with pytest.raises(BadLoad):
            Load(**load)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [field.name for field in fields(Load)])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400], ids=["inf", "nan", "huge"])
def test_a_load_that_is_not_finite_or_too_large_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadLoad, match="give a number"):
        Load(**({"tasks_per_second": 1.0} | {name: value}))


def test_each_further_replica_is_one_more_copy_that_is_sent() -> None:
    """A record leaves a broker twice for its readers, and once for each replica beside the leader's."""
    into = size_of(Load(500)).totals["broker_in_mb_per_second"]
    sent = [size_of(Load(500, replicas=count)).totals["broker_sent_mb_per_second"] / into for count in (1, 2, 3, 5)]
    assert sent == pytest.approx([2, 3, 4, 6])


@pytest.mark.parametrize("count", [0, 33, 10**9])
def test_replicas_that_no_cluster_has_are_refused(count: int) -> None:
    with pytest.raises(BadLoad, match=f"the number of replicas is {count}: give a number from 1 to 32"):
        Load(1, replicas=count)


@pytest.mark.parametrize("options", ["--tasks-per-second inf", "--tasks-per-second 1 --wait inf"])
def test_the_command_refuses_what_is_not_finite(options: str) -> None:
    wrong = CliRunner().invoke(app, ["size", *options.split()])
    assert wrong.exit_code == 2 and "give a number up to" in wrong.stderr and not wrong.stdout


def test_the_command_prints_tables_and_data() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["size", "--tasks-per-second", "500"])
    assert shown.exit_code == 0 and "partitions of the keyed topics: 8" in shown.stdout
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.partition("\n\n")[0].splitlines()[1:]}
    assert rows.keys() == {each.name for each in APPLICATIONS}, "each application has a row"
    assert rows.pop("join")[1] == rows.pop("scoring")[1] == "1" and rows.pop("gateway")[1] == "3"
    assert all(row == ["not", "measured"] for row in rows.values())
    found = json.loads(runner.invoke(app, ["size", "--tasks-per-second", "500", "-o", "json"]).stdout)
    assert "hinting" in found["not_measured"] and "join" not in found["not_measured"]
    assert found["partitions"] == 8 and found["applications"]["join"]["workers"] == 1
    wrong = runner.invoke(app, ["size", "--tasks-per-second", "-1"])
    assert wrong.exit_code == 2 and "above 0" in wrong.stderr
