"""The comparison of quarters, the report, the view, the folders of runs."""

import json
import random
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from tentalis.agents.scenarios import make_scenario
from tentalis.cli.shared.trainer_changes import configured
from tentalis.demo import play, watch
from tentalis.demo.play import DemoOptions, _flags, next_commands, printable
from tentalis.demo.report import DemoReport, html_of, write_report
from tentalis.demo.runs import RunKind, open_run, trainer_config, unfinished
from tentalis.demo.stats import RunStats
from tentalis.demo.summary import AnswerPair, Summary, p_greater, summarise
from tentalis.demo.view import Snapshot, bar, live_view, plain_line, served_step, sparkline
from tentalis.service.settings import Settings
from tests.support.loop_records import RUN, T0, ack, manifest, outcome, promotion, result, step_result, task, update
from trainer.config.trainer_config import TrainerConfig


def learning(versions: int = 16, gain: float = 1.0, tasks: int = 4) -> RunStats:
    stats, rng = RunStats(RUN), random.Random(1)
    stats.apply(manifest(steps=versions - 1), T0)
    for version in range(1, versions + 1):
        for number in range(tasks):
            of = task(f"{version}-{number}", n=8, metadata={"round": str(version - 1)})
            stats.apply(of, T0)
            for index in range(8):
                reward = float(rng.random() < 0.1 + gain * 0.8 * version / versions)
                stats.apply(outcome(of, index, version=version, reward=reward), T0)
    stats.apply(update(versions), T0)
    stats.apply(ack(versions), T0)
    return stats


def test_a_run_that_learns_is_told_from_one_that_does_not() -> None:
    better, same = summarise(learning(), 15, 1.0), summarise(learning(gain=0.0), 15, 1.0)
    assert better.first is not None and better.last is not None and better.p_value is not None
    assert better.first.versions == (1, 2, 3, 4) and better.last.versions == (13, 14, 15, 16)
    assert (better.first.n, better.first.tasks) == (128, 16)
    assert better.last.mean > better.first.mean
    assert better.p_value < 0.001
    assert same.p_value is not None and same.p_value > 0.001


def test_the_steps_of_a_branch_continue_those_of_the_run() -> None:
    stats = RunStats(RUN)
    branch = manifest(first=5).model_copy(update={"run_id": f"{RUN}.1", "parent_run": RUN, "parent_step": 2})
    refused = promotion(3, "rollback").model_copy(update={"reason": "assistant@v4 was refused: one word"})
    for each in (manifest(first=1), step_result(2, 3), step_result(3, 4), refused, branch):
        stats.apply(each, T0)
    assert max(stats.metrics) == 3 and stats.rollbacks == {refused.event_time: refused.reason}
    assert (RunStats(RUN).newest_branch, stats.newest_branch) == (RUN, f"{RUN}.1")
    for step in (1, 2):
        stats.apply(step_result(step, 5 + step, f"{RUN}.1"), T0)
        stats.apply(update(5 + step, run_id=f"{RUN}.1"), T0)
        stats.apply(ack(5 + step), T0 + 1000 * step)
    assert max(stats.metrics) == 4 and served_step(stats) == 4
    assert [stats.step_of(version) for version in (1, 3, 5, 7)] == [0, 2, 2, 4]
    alien = manifest(first=20).model_copy(update={"run_id": "other", "parent_run": "else", "parent_step": 1})
    stats.apply(alien, T0)
    stats.apply(step_result(9, 9, "other"), T0)
    assert max(stats.metrics) == 4


def test_a_demo_is_guarded_and_where_only_a_rule_decides_by_scores_alone() -> None:
    for scenario, shaped in (("assistant", True), ("math", False)):
        kind = RunKind(scenario, 3, "/m/base")
        config = TrainerConfig.model_validate(trainer_config("r", kind, make_scenario(scenario, None)))
        assert config.promotion == "guarded"
        assert [config.guard.min_length > 0, config.guard.max_similarity < 1.0] == [shaped, shaped]


def test_p_is_one_sided_and_exact_for_few_values() -> None:
    assert p_greater([3.0, 4.0], [1.0, 2.0]) == pytest.approx(1 / 6)
    assert p_greater([1.0, 2.0], [3.0, 4.0]) == 1.0
    assert p_greater([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert p_greater([1.0] * 16, [0.0] * 16) < 0.001


@pytest.mark.parametrize(("versions", "size"), [(2, 1), (4, 1), (7, 1), (8, 2), (16, 4)])
def test_a_quarter_is_at_least_one_version(versions: int, size: int) -> None:
    summary = summarise(learning(versions), versions - 1, 1.0)
    assert summary.first is not None and len(summary.first.versions) == size


def test_a_run_of_one_version_has_no_comparison() -> None:
    summary = summarise(learning(1), 0, 1.0)
    assert (summary.first, summary.last, summary.p_value) == (None, None, None)
    assert json.loads(json.dumps(summary.as_json()))["p_value"] is None


def test_a_quarter_of_one_task_has_no_test() -> None:
    stats = learning(2)
    of = task("only", n=1)
    stats.apply(of, T0)
    stats.apply(outcome(of, 0, version=3, reward=1.0), T0)
    summary = summarise(stats, 2, 1.0)
    assert summary.last is not None and summary.last.tasks == 1 and summary.p_value is None


def test_the_json_object_has_what_is_promised() -> None:
    value = json.loads(json.dumps(summarise(learning(), 15, 12.34).as_json()))
    assert set(value) == {
        "run_id",
        "steps",
        "reward_by_version",
        "first_quarter",
        "last_quarter",
        "p_value",
        "wall_seconds",
        "start_seconds",
        "seconds_by_phase",
    }
    assert set(value["reward_by_version"][0]) == {"version", "mean", "n", "stderr", "mean_words", "on_topic_share"}
    assert value["wall_seconds"] == 12.3 and value["start_seconds"] is None


def test_the_times_are_the_same_in_the_report_and_as_json() -> None:
    stats = learning()
    of = task("timed", metadata={"round": "0"})
    stats.apply(result(of), T0 + 1500)
    summary = summarise(stats, 15, 12.34, 4.2)
    assert summary.times() == {
        "seconds until the first task": "4.2",
        "median time per step": "sampling 1.5 s, judging 0.0 s, serving 0.0 s",
    }
    value = summary.as_json()
    assert (value["start_seconds"], value["seconds_by_phase"]) == (
        4.2,
        {"sampling": 1.5, "judging": 0.0, "serving": 0.0},
    )
    assert summarise(RunStats(RUN), 0, 1.0).times() == {}


HOSTILE = "<script>alert('x')</script><img src=x onerror=y> & \"quoted\" ]]>"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def hostile_report(summary: Summary) -> DemoReport:
    return DemoReport(
        summary=summary,
        answers=(AnswerPair(HOSTILE, HOSTILE, HOSTILE),),
        newest=HOSTILE,
        facts={HOSTILE: HOSTILE},
        config=HOSTILE,
        versions={HOSTILE: HOSTILE},
        commands=(HOSTILE,),
    )


def test_the_report_escapes_whatever_it_is_given(tmp_path: Path) -> None:
    stats = learning(3)
    stats.run_id = HOSTILE
    page = write_report(tmp_path, hostile_report(summarise(stats, 2, 1.0)))
    html = page.read_text(encoding="utf-8")
    parser = Tags()
    parser.feed(html)
    assert "script" not in parser.tags and parser.tags.count("img") == 1
    assert "onerror" not in parser.attributes
    assert "".join(parser.text).count(HOSTILE) >= 9, "shown as it is, every time"
    assert (tmp_path / "reward.png").read_bytes()[:4] == b"\x89PNG"


def test_the_report_needs_nothing_from_elsewhere() -> None:
    report = hostile_report(summarise(learning(3), 2, 1.0))
    sources = re.findall(r'(?:src|href)="([^"]*)"', html_of(report, b"png"))
    assert sources and all(source.startswith("data:") for source in sources)


def test_a_report_without_answers_says_so() -> None:
    report = hostile_report(summarise(learning(1), 0, 1.0))
    html = html_of(DemoReport(report.summary, (), "p@v1", {}, "", {}, ()), b"")
    assert "The model server did not answer." in html and "Too few versions" in html


# The view.


def snapshot(stats: RunStats) -> Snapshot:
    processes = {"broker": {"state": "ready", "restarts": 0}, "worker": {"state": "backoff", "restarts": 2}}
    return Snapshot(stats, 15, processes, {"tentalis-worker-chat": 7}, 75.0)


def test_the_plain_line_is_one_line_with_the_news() -> None:
    line = plain_line(snapshot(learning()))
    assert "\n" not in line
    for part in ("[1:15]", "step 15/15", "tasks 64", "both 512", "reward v16", "worker backoff"):
        assert part in line
    assert "no reward yet" in plain_line(snapshot(RunStats(RUN)))


def test_the_time_left_is_the_median_step_times_the_steps_that_are_left() -> None:
    def served(*seconds: int) -> Snapshot:
        stats = RunStats(RUN)
        stats.apply(manifest(steps=15), T0)
        for version, second in enumerate(seconds, 1):
            stats.apply(update(version), T0 + 1000 * second)
            stats.apply(ack(version), T0 + 1000 * second)
        return snapshot(stats)

    assert "left" not in plain_line(served(0, 20)), "one step is no measure"
    # The fourth step waited for somebody who had stopped the run.
    assert "· about 3:40 left" in plain_line(served(0, 20, 40, 60, 4000))
    assert "left" not in plain_line(served(*range(0, 320, 20)))


def test_the_live_view_shows_everything_also_of_an_empty_run() -> None:
    from rich.console import Console

    for stats, words in (
        (learning(), ("v16", "both", "published", "worker", "backoff", "7")),
        (RunStats(RUN), ("open",)),
    ):
        console = Console(width=160, record=True, markup=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        console.print(live_view(snapshot(stats), 160, 50))
        text = console.export_text()
        for word in words:
            assert word in text


def test_a_small_terminal_is_shown_what_fits_into_it() -> None:
    from rich.console import Console

    for stats in (learning(), RunStats(RUN)):
        console = Console(width=80, height=24, record=True, markup=False, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
        console.print(live_view(snapshot(stats), 80, 24))
        text = console.export_text()
        assert len(text.splitlines()) <= 12 and all(len(line) <= 80 for line in text.splitlines())
        assert "worker backoff (2)" in text and "Ctrl-C" in text
        assert "behind: worker 7" in text and "published" in text


def test_what_a_model_says_cannot_move_the_cursor() -> None:
    assert printable("plain, ünï\n☃") == "plain, ünï\n☃"
    assert printable("a\x1b[2Jb\x08\u200b\r") == "a\ufffd[2Jb\ufffd\ufffd\ufffd"


def test_a_bar_has_the_height_of_its_reward() -> None:
    assert bar(-1.0) == bar(0.0) == "▁" and bar(1.0) == "█"
    assert len(sparkline(learning().scores())) == 16


# The folders of runs.


KIND = RunKind("assistant", 15, "/models/tiny")


def test_an_unfinished_run_is_gone_on_with_and_a_finished_one_is_not(tmp_path: Path) -> None:
    scenario = make_scenario("assistant")
    first = open_run(tmp_path, KIND, scenario, 1_700_000_000.0)
    assert (first.run_id, first.resumed) == ("demo-20231114-221320", False)
    again = open_run(tmp_path, KIND, scenario, 1_700_000_999.0)
    assert (again.run_id, again.resumed) == (first.run_id, True)
    again.finish()
    another = open_run(tmp_path, KIND, scenario, 1_700_000_000.0)
    assert (another.run_id, another.resumed) == ("demo-20231114-221321", False)


def test_a_run_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    scenario = make_scenario("assistant")
    open_run(tmp_path, KIND, scenario, 1_700_000_000.0)
    overridden = replace(KIND, changes=("loss.opd_weight=0",))
    for other in (RunKind("assistant", 3, KIND.base_model), RunKind("math", 15, KIND.base_model), overridden):
        assert unfinished(tmp_path, other) is None
    # Killed before its configuration was written: never begun.
    (tmp_path / "demo-20990101-000000").mkdir()
    found = unfinished(tmp_path, KIND)
    assert found is not None and found.run_id == "demo-20231114-221320"


def test_the_trainers_configuration(tmp_path: Path) -> None:
    run = open_run(tmp_path, KIND, make_scenario("assistant"), 0.0)
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    assert config["run_id"] == run.run_id
    assert (config["steps"], config["batch_rollouts"], config["max_staleness"]) == (15, 32, 0)
    assert (config["policy"], config["base_model_name"], config["loss"]["opd_weight"]) == ("assistant", "tiny", 1.0)


def test_a_run_with_settings_of_its_own_goes_on_with_them(tmp_path: Path) -> None:
    kind = replace(KIND, changes=("loss.opd_weight=0", "seed=3", "loss=dapo"))
    first = open_run(tmp_path, kind, make_scenario("assistant"), 0.0, configured)
    config = yaml.safe_load(first.config.read_text(encoding="utf-8"))
    assert (config["loss"]["rl_weight"], config["loss"]["opd_weight"], config["loss"]["kind"]) == (1.0, 0.0, "dapo")
    assert config["seed"] == 3
    assert open_run(tmp_path, kind, make_scenario("assistant"), 5.0).run_id == first.run_id


def test_the_summary_names_the_next_commands() -> None:
    first = ("tentalis replay r", "tentalis verify r")
    assert next_commands("r", "r", stays=False) == (*first, "tentalis up")
    assert next_commands("r", "r", stays=True) == (*first, "tentalis status"), "`up` is refused while the stack stays"
    rolled_back = ("tentalis replay r.2", "tentalis verify r", "tentalis up")
    assert next_commands("r", "r.2", stays=False) == rolled_back, "the branch trained what is served"
    assert _flags(DemoOptions()) == []
    assert _flags(DemoOptions("math", 3, "m")) == ["--scenario", "math", "--steps", "3", "--policy-model", "m"]
    assert _flags(DemoOptions(changes=("a.b=1", "c=[1, 2]"))) == ["--set", "a.b=1", "--set", "'c=[1, 2]'"]


def test_the_demo_waits_only_for_the_applications_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions and experience may have run in this directory earlier: nobody works off what they left."""
    waited: list[str] = []
    monkeypatch.setattr(watch, "drain", lambda settings, groups, *rest: waited.extend(groups) or True)
    status = {name: {"state": "ready"} for name in ("broker", "worker", "scoring", "join", "trainer")}
    nobody = cast(Any, SimpleNamespace(status=lambda: status, environment="chat", policy="assistant", run_id="r"))
    show = play.Show(nobody, DemoOptions(), nobody, Settings(), "", nobody, nobody, threading.Event(), {})
    show.watch.drain()
    assert waited == ["tentalis-worker-chat", "tentalis-scoring", "tentalis-join"]
