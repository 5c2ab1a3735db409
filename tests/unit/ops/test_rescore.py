"""Which recorded answers are scored again, by what, and what is written."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Ending, Forget, Result, Status, Task, Verifier
from tentalis.agents.environments import EnvironmentOptions
from tentalis.agents.environments.regrading import REGRADERS
from tentalis.agents.sandbox import Wall
from tentalis.ops.rescore import process
from tentalis.ops.rescore.core import (
    BadScorerLabel,
    NothingToScore,
    ScoredAnswers,
    ScorerLabel,
    planned_tasks,
)
from tentalis.ops.rescore.graders import EPISODE_GRADERS, LeftOut, RuleGrader, grader_of
from tentalis.rewards import registry
from tentalis.rewards.score import score_of_result
from tentalis.rewards.verdict import ScoredStep, Verdict
from tentalis.service.settings import Settings
from tests.support import loop_records
from tests.support.environment_pages import forget_environments, write_environments
from tests.support.loop_records import RUN, T0


def no_wall() -> Wall:
    raise AssertionError("needs no wall")


OPTIONS = EnvironmentOptions(no_wall)


def answer(text: str, reference: str = "42", task_id: str = "t0", **more: Any) -> Result:
    verifier = Verifier(name="gsm8k", data=json.dumps({"answer": reference}))
    task = loop_records.task(task_id, environment="math", verifier=verifier, user_id="u")
    return loop_records.result(task, text=text, **more)


def test_a_label_names_environment_scorer_and_version() -> None:
    assert ScorerLabel.parse("swe/tests@2") == ScorerLabel("swe", "tests", "2")
    assert str(ScorerLabel.parse("math/math")) == "math/math"
    for text in ("swe", "swe/", "/tests", "swe/tests@", "a/b/c"):
        with pytest.raises(BadScorerLabel, match="ENVIRONMENT/NAME@VERSION"):
            ScorerLabel.parse(text)


def test_the_graders_of_episodes_are_those_of_the_environments() -> None:
    assert frozenset(REGRADERS) == EPISODE_GRADERS


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("math/nothing", "math has no such scorer; it has math/gsm8k, math/math, math/math_verify, math/reasoning_gym"),
        ("math/gsm8k@99", "this installation has version"),
        ("chat/next_state", "judges by feedback"),
        ("toolcall/answer", "name a version, such as toolcall/answer@2"),
    ],
)
def test_scorers_that_cannot_be_used(label: str, message: str) -> None:
    with pytest.raises(BadScorerLabel, match=message):
        grader_of(ScorerLabel.parse(label), OPTIONS)


def verdict(label: str, result: Result) -> Verdict:
    return asyncio.run(grader_of(ScorerLabel.parse(label), OPTIONS).verdict(result))


def test_another_verifier_reads_the_data_of_the_task() -> None:
    assert str(grader_of(ScorerLabel.parse("math/math"), OPTIONS).label).startswith("math/math@")
    assert verdict("math/math", answer(r"It is \boxed{42}.")).reward == 1.0
    assert verdict("math/math", answer("It is \\boxed{41}.")).reward == 0.0
    assert verdict("math/math", answer("", status=Status.FAILED)).reward == -1.0
    with pytest.raises(LeftOut, match="not valid"):
        verdict("math/reasoning_gym", answer("42"))


class StepJudge:
    name = "steps/1"
    time_limit_s = 1.0

    def check(self, task: Task) -> None: ...

    async def judge(self, task: Task, result: Result) -> Verdict:
        return Verdict(1.0, steps=(ScoredStep(0, 1, 3e38),))


def test_a_verdict_that_no_score_may_have_is_left_out() -> None:
    grader = RuleGrader(ScorerLabel("math", "steps", "1"), StepJudge())
    with pytest.raises(LeftOut, match="scores from -100 to 100"):
        asyncio.run(grader.verdict(answer("42")))


def test_an_episode_has_the_components_of_its_environment() -> None:
    verifier = Verifier(name="episode", data='{"answer": "42"}')
    task = loop_records.task(environment="toolcall", verifier=verifier)
    played = loop_records.result(
        task, text="The answer is 42.", ending=Ending.DONE, rewards={"calls": 2.0, "reward": 0.0}
    )
    found = verdict("toolcall/answer@2", played)
    assert found.reward == 1.0 and found.components["calls"] == 2.0 and found.components["ending.done"] == 1.0
    with pytest.raises(LeftOut, match="not an episode"):
        verdict("toolcall/answer@2", loop_records.result(task))


def test_an_environment_of_a_file_has_the_checks_of_its_base(tmp_path: Path) -> None:
    registry.use_environments(write_environments(tmp_path))
    try:
        verifier = Verifier(name="episode", data='{"answer": "Lima"}')
        task = loop_records.task(environment="capitals", verifier=verifier)
        played = loop_records.result(task, text="\\boxed{Lima}", ending=Ending.DONE, rewards={"calls": 1.0})
        assert verdict("capitals/answer@2", played).reward == 1.0
        with pytest.raises(BadScorerLabel, match=r"it has capitals/episode, .*capitals/answer$"):
            grader_of(ScorerLabel.parse("capitals/nothing"), OPTIONS)
    finally:
        forget_environments()


def test_scores_of_one_label_have_one_id_and_are_beside_the_old_ones() -> None:
    result = answer("42")
    first, again, other = (
        score_of_result(result, Verdict(1.0), label, T0 + i) for i, label in enumerate(("a@1", "a@1", "a@2"))
    )
    assert first.score_id == again.score_id != other.score_id
    assert (first.scorer, first.sample.result_id, first.reward) == ("a@1", result.result_id, 1.0)


def test_answers_that_wait_for_their_first_score_or_are_erased_are_left_out() -> None:
    scored = ScoredAnswers("math/math@2")
    result = answer("42")
    scored.apply(score_of_result(result, Verdict(0.5), "math/math@2", T0))
    assert "no score yet" in (scored.left_out(result) or ""), "a score of the label itself is not the first one"
    scored.apply(score_of_result(result, Verdict(0.0), "gsm8k/2", T0))
    scored.apply(score_of_result(result, Verdict(1.0), "other/1", T0))
    assert scored.left_out(result) is None and scored.old == {result.result_id: 0.0}
    assert scored.done == {result.result_id}
    scored.apply(Forget(forget_id="f", event_time=T0, user_id="u"))
    assert "erased" in (scored.left_out(result) or "")


def test_the_tasks_of_a_plan() -> None:
    plan = loop_records.plan(1, ["a/b/0", "c/1/opd/x"], "r")
    assert planned_tasks(plan) == {"a/b", "c"}


def test_what_is_written_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped command continues; with a dry run nothing is written."""
    right, wrong, other = answer("42"), answer("41", task_id="t1"), answer("42", task_id="t2")
    foreign = answer("42", task_id="t3")
    foreign = foreign.model_copy(update={"task": foreign.task.model_copy(update={"run_id": "else"})})
    log: dict[str, list[Any]] = {
        "tentalis.halves.v1": [score_of_result(each, Verdict(0.0), "gsm8k/2", T0) for each in (right, wrong, foreign)],
        "tentalis.batches.v1": [],
        "tentalis.results.v1": [right, right, wrong, other, foreign],
    }

    class Written:
        def __init__(self, *_: object) -> None: ...

        def send(self, topic: str, record: Any) -> None:
            log[topic].append(record)

        def flush(self) -> None: ...

    monkeypatch.setattr(process, "Publisher", Written)
    monkeypatch.setattr(process, "records_to_end", lambda settings, names, codec: iter(list(log[names[0]])))
    grader = grader_of(ScorerLabel.parse("math/gsm8k"), OPTIONS)

    def run(*, write: bool) -> tuple[process.RescoringWork, list[tuple[str, float | None, float | None]]]:
        work = process.find_work(Settings(), RUN, grader.label)
        rows = process.rescore(Settings(), work, grader, write=write, parallel=2)
        return work, [(row.task_id, row.old, row.new) for row in rows]

    work, rows = run(write=False)
    assert rows == [("t0", 0.0, 1.0), ("t1", 0.0, 0.0)] and len(log["tentalis.halves.v1"]) == 3
    assert [(row.task_id, row.left_out is not None) for row in work.left_out] == [("t2", True)]
    assert run(write=True)[1] == rows
    written = log["tentalis.halves.v1"][3:]
    assert [(each.scorer, each.reward) for each in written] == [(str(grader.label), 1.0), (str(grader.label), 0.0)]
    work, rows = run(write=True)
    assert (work.already, rows, len(log["tentalis.halves.v1"])) == (2, [], 5)
    with pytest.raises(NothingToScore, match="no results of run nothing"):
        process.find_work(Settings(), "nothing", grader.label)
