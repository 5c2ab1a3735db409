"""Earlier feedback of other sources is a part of a reward: thumbs and a manager's score, with weights."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import topics
from schemas.records import Feedback, Opens, Polarity, Score, Source, Terms, Verifier
from streams.apps.scoring.grades import GradeRefs, Grades
from streams.apps.scoring.judging import Judging
from streams.apps.scoring.processor import Scoring
from streams.fold.pairing import Pairing
from streams.fold.recent_results import OffsetRef
from streams.runtime.processor import LogRecord
from tentalis.rewards import registry
from tentalis.rewards.combined import CombinedScorer, CombinedSettings
from tests.support.pairing_support import HORIZON, PARTITION, Logs
from tests.support.stream_records import CODEC, make_feedback, make_result, make_task, read, unchecked

PARTS = {
    "next": {"scorer": "next_state", "weight": 2.0},
    "user": {"source": "user", "weight": 1.0},
    "manager": {"source": "manager", "weight": 1.0},
}
TERMS = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)
TASK = make_task(verifier=Verifier(name="all"), terms=TERMS, n_samples=1)
RESULT = make_result(TASK)
UP, DOWN = Polarity.POSITIVE, Polarity.NEGATIVE


@pytest.fixture(autouse=True)
def all_(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = registry.ENVIRONMENTS["chat"]
    scorer = CombinedScorer(CombinedSettings(kind="combined", parts=PARTS), chat)
    monkeypatch.setitem(registry.ENVIRONMENTS, "chat", {**chat, "all": scorer})


def said(name: str, source: Source, **fields: Any) -> Feedback:
    return make_feedback(fields.pop("result", RESULT), feedback_id=name, source=source, **fields)


def thumb(name: str, polarity: Polarity = DOWN, source: Source = Source.USER, **fields: Any) -> Feedback:
    return said(name, source, polarity=polarity, **fields)


def next_state(text: str = "Thanks, that is perfect!", **fields: Any) -> Feedback:
    return said("next", Source.NEXT_STATE, text=text, polarity=Polarity.NONE, author="user", **fields)


def bare(feedback: Feedback) -> Feedback:
    return unchecked(feedback, result=None)  # type: ignore[no-any-return]


class Lab:
    """Scoring over a log of feedback, and its state."""

    def __init__(self, *records: Feedback, at: tuple[int, ...] = ()) -> None:
        self.logs = Logs()
        for place, record in enumerate(records):
            self.logs.put(topics.FEEDBACK, record, at[place] if at else 5_000)
        self.state: dict[str, bytes] = {}
        self.start()

    def start(self) -> None:
        """As after a restart."""
        pairing, grades = Pairing(CODEC, self.logs, HORIZON), Grades(CODEC, self.logs, HORIZON)
        self.app = Scoring(CODEC, Judging(), pairing, grades)
        self.app.restore(PARTITION, self.state)

    def run(self, *records: LogRecord) -> list[Score]:
        """The scores that the reward answers to."""
        effects = asyncio.run(self.app.process(PARTITION, records))
        assert not effects.dead
        for key, value in (change for wave in effects.changes for change in wave):
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value
        made = [read(each) for each in effects.outputs]
        return [each for each in made if isinstance(each, Score) and each.source is Source.NEXT_STATE]

    def score(self) -> Score:
        (score,) = self.run(*self.logs.topics[topics.FEEDBACK])
        return score


def components(score: Score) -> Mapping[str, float]:
    return {name: value for name, value in score.components.items() if "." not in name or "missing" in name}


def test_thumbs_and_a_managers_score_before_the_next_message_are_parts_of_the_reward() -> None:
    score = Lab(thumb("t"), said("m", Source.MANAGER, score=0.75, polarity=Polarity.NONE), next_state()).score()
    assert components(score) == {"next": 1.0, "user": -1.0, "manager": 0.5, "weight_present": 1.0}
    assert score.reward == pytest.approx((2.0 * 1.0 + 1.0 * -1.0 + 1.0 * 0.5) / 4.0)


def test_of_one_source_the_newest_counts_and_of_what_comes_later_nothing() -> None:
    score = Lab(thumb("t"), thumb("u", UP), next_state(), thumb("v", DOWN, Source.MANAGER)).score()
    assert components(score) == {"next": 1.0, "user": 1.0, "weight_present": 0.75, "missing.manager": 1.0}


def test_a_thumb_on_the_last_turn_is_all_there_is() -> None:
    score = Lab(thumb("t"), next_state("")).score()
    assert score.reward == -1.0 and score.components["missing.next"] == 1.0


def test_what_is_said_to_another_answer_or_long_before_is_no_part() -> None:
    other = make_result(make_task("other", verifier=TASK.verifier, terms=TASK.terms, n_samples=1))
    assert Lab(thumb("t", result=other), next_state()).score().reward == 1.0
    assert Lab(thumb("t"), next_state(), at=(5_000, 5_001 + HORIZON)).score().reward == 1.0
    assert Lab(thumb("t"), next_state(), at=(5_000, 5_000 + HORIZON)).score().reward == pytest.approx(1 / 3)


def test_a_grade_that_names_its_task_alone_is_a_part_too() -> None:
    lab = Lab(bare(thumb("t")), next_state())
    lab.logs.put(topics.RESULTS, RESULT, 5_000)
    lab.run(*lab.logs.topics[topics.RESULTS])
    assert lab.score().reward == pytest.approx(1 / 3)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_restart_between_them_changes_nothing(cut: int) -> None:
    records = (thumb("t"), thumb("m", UP, Source.MANAGER), next_state())
    whole = Lab(*records).score()
    lab = Lab(*records)
    log = lab.logs.topics[topics.FEEDBACK]
    assert not lab.run(*log[:cut])
    assert all(value.count(b"cats") == 0 and len(value) < 100 for value in lab.state.values())
    lab.start()
    (score,) = lab.run(*log[cut:])
    assert score == whole
    lab.start()
    assert lab.run(*log) == [whole], "everything is delivered again"


def test_nothing_is_kept_where_no_reward_has_grades_for_parts() -> None:
    alone = make_result(make_task(terms=Terms(rl=Source.RESULT), verifier=Verifier(name="taste"), n_samples=1))
    lab = Lab(thumb("t", result=alone))
    lab.run(*lab.logs.topics[topics.FEEDBACK])
    assert not lab.state


def test_a_thumb_before_the_next_message_is_the_reward_and_a_later_one_is_late() -> None:
    alone = make_result(make_task(terms=TASK.terms, verifier=Verifier(name="next_state"), n_samples=1))
    lab = Lab(thumb("t", result=alone), next_state(result=alone))
    score = lab.score()
    assert (score.reward, score.components["explicit"], len(lab.state)) == (-1.0, -1.0, 1)
    assert Lab(thumb("t", UP, result=alone), next_state("", result=alone)).score().reward == 1.0, "a thumb alone"
    assert Lab(next_state(result=alone), thumb("t", result=alone)).score().reward == 1.0


def halves_of(*records: Feedback) -> list[Score]:
    """All scores of a log of feedback, also those that the reward does not answer to."""
    lab = Lab(*records)
    effects = asyncio.run(lab.app.process(PARTITION, lab.logs.topics[topics.FEEDBACK]))
    return [made for each in effects.outputs if isinstance(made := read(each), Score)]


@pytest.mark.parametrize(("verifier", "marked"), [("next_state", True), ("all", False)])
def test_a_thumb_is_marked_as_the_whole_reward_where_it_would_be(verifier: str, marked: bool) -> None:
    """The join lets such a grade replace the reward of the turn; a part of a combined reward must not."""
    alone = make_result(make_task(terms=TERMS, verifier=Verifier(name=verifier), n_samples=1))
    late = halves_of(next_state(result=alone), thumb("t", result=alone))[-1]
    assert (late.source, late.reward) == (Source.USER, -1.0)
    assert late.components == ({"explicit": -1.0, "explicit.user": 1.0} if marked else {"feedback": -1.0})


def test_feedback_on_a_task_with_an_unknown_scorer_leaves_no_state() -> None:
    strange = make_result(make_task(terms=TERMS, verifier=Verifier(name="unheard of"), n_samples=1))
    lab = Lab(thumb("t", result=strange), next_state(result=strange))
    lab.run(*lab.logs.topics[topics.FEEDBACK])
    assert not lab.state


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=30), st.integers(0, 29))
def test_grades_are_found_until_nobody_can_ask_for_them_and_then_forgotten(
    came: list[tuple[int, int]], cut: int
) -> None:
    """`came`: task and ms since the one before."""
    state: dict[str, bytes] = {}
    graded, refs, time = GradeRefs(50, {}), list[OffsetRef](), 0
    for offset, (task, pause) in enumerate(came):
        time += pause
        refs.append(ref := OffsetRef(offset, time, task))
        graded.passed(time)
        graded.add(ref)
        expected = [f for f in refs[:-1] if f.task == task and time - f.time <= 50]
        assert graded.before(ref) == expected[::-1]
        for key, value in (change for wave in graded.take_changes() for change in wave):
            state.update({key: value}) if value is not None else state.pop(key)
        assert len(graded) == len(state) == len([f for f in refs if f.time + 100 >= time])
        if offset == cut:
            graded = GradeRefs(50, state)
            graded.passed(time)
