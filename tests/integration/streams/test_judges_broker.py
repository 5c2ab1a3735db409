"""Judges that are models, asked over HTTP by the running applications: next state, steps, hints, lessons."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import Hint, HintKind, Opens, Polarity, Record, Score, Source, Terms, Verifier
from schemas.tensors import float32_view, int32_bytes
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.support.apps_lab import Apps
from tests.support.judge_server import HANG, JudgeServer, Reply, judge_in_thread, says
from tests.support.model_server import model_server
from tests.support.sessions_support import end, turn
from tests.support.stream_records import make_feedback, make_result, make_task

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]

NEXT = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)
HINT = "Answer in one short sentence."
LESSON = "Do: answer in one line.\nDon't: use lists."
TELLS = f"They wanted it short. [LESSON_START]\n{LESSON}\n[LESSON_END] \\boxed{{1}}"
LIMIT_S = 20


def judge(server: JudgeServer, limit_s: int = LIMIT_S) -> str:
    return f'{{url: "{server.url}", model: judge, time_limit_s: {limit_s}}}'


def voting(good: str) -> list[Reply]:
    """Of four votes one hangs, and one cannot be read."""
    return [says(good), HANG, says(good), says("I could not say.")]


def metric(port: int, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """A metric's values by those of its labels that are named."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


@pytest.fixture
def apps(own_broker: EmbeddedBroker, tmp_path: Path) -> Iterator[Apps]:
    with Apps(Settings(bootstrap=own_broker.bootstrap), tmp_path) as apps:
        yield apps


@pytest.fixture
def teacher() -> Iterator[str]:
    with model_server() as url:
        yield url


def test_judges_vote_at_once_and_a_vote_that_hangs_holds_no_other(apps: Apps, teacher: str, tmp_path: Path) -> None:
    turn_ = make_result(make_task("turn", terms=NEXT, verifier=Verifier(name="next_state"), n_samples=1))
    ungraded: dict[str, Any] = {"source": Source.NEXT_STATE, "author": "user", "polarity": Polarity.NONE}
    reaction = make_feedback(turn_, "Shorter, please.", **ungraded)
    steps = make_task("steps", terms=Terms(rl=Source.RESULT), verifier=Verifier(name="steps"), n_samples=1)

    # No vote is answered before all four of its question have come: they are asked for at once.
    hint = f"\\boxed{{1}} [HINT_START]{HINT}[HINT_END]"
    with (
        judge_in_thread(voting("\\boxed{-1}"), together=4) as of_turns,
        judge_in_thread(voting('{"progress": 1.0, "correctness": 0.5}'), together=4) as of_steps,
        judge_in_thread(voting(hint), together=4) as of_hints,
    ):
        (tmp_path / "scorers.yaml").write_text(
            f"judges:\n  turns: {judge(of_turns)}\n  steps: {judge(of_steps)}\n"
            "environments:\n  chat:\n"
            "    next_state: {kind: next_state, judge: turns, votes: 4, rules_first: false}\n"
            "    steps: {kind: steps, judge: steps, votes: 4}\n"
        )
        (tmp_path / "hinters.yaml").write_text(
            f'hinters:\n  "*": {{kind: judge, endpoint: {judge(of_hints)}, votes: 4}}\n'
        )
        ports = free_port(), free_port()
        apps.start("scoring", "--scorers", str(tmp_path / "scorers.yaml"), "--metrics-port", str(ports[0]))
        server = ("--server", teacher, "--metrics-port", str(ports[1]))
        apps.start("hinting", "--hinters", str(tmp_path / "hinters.yaml"), *server)
        apps.put(topics.RESULTS, make_result(steps, text="First this. Then that."))
        apps.put(topics.FEEDBACK, reaction)

        def halves(kind: type[Record]) -> dict[str, Record]:
            return {half.key: half for half in apps.read(topics.HALVES, kind)}

        apps.wait(lambda: set(halves(Score)) == {"turn", "steps"} and set(halves(Hint)) == {"turn"})
        votes = metric(ports[0], "tentalis_scoring_judge_votes_total", "scorer", "result")
        ratios = metric(ports[0], "tentalis_scoring_judge_unparsable_ratio", "scorer")
        hints = metric(ports[1], "tentalis_hinting_judge_votes_total", "vote")
        for name in ("scoring", "hinting"):
            apps.end(name)
    of_turn, of_step, made = halves(Score)["turn"], halves(Score)["steps"], halves(Hint)["turn"]
    assert isinstance(of_turn, Score) and isinstance(of_step, Score) and isinstance(made, Hint)
    assert of_turn.reward == -1.0 and of_turn.scorer.startswith("next_state/3+")
    assert Counter(of_turn.votes) == {"-1": 2, "cancelled": 1, "unparsable": 1}, "three decide"
    assert of_step.reward == 0.5 and of_step.components["steps_unknown"] == 0.0
    assert (made.kind, made.hints) == (HintKind.ACCEPTED, (HINT,))
    asked = [len(each.asked) for each in (of_turns, of_steps, of_hints)]
    assert asked == [4, 4, 4]
    by_kind = {(scorer.split("/")[0], kind): count for (scorer, kind), count in votes.items() if count}
    assert by_kind == {
        (scorer, kind): count
        for scorer, hung in (("next_state", "cancelled"), ("steps", "missing"))
        for kind, count in (("read", 2), (hung, 1), ("unparsable", 1))
    }
    assert {round(ratio, 3) for (scorer,), ratio in ratios.items() if "+" in scorer} == {0.333}
    assert {said: count for (said,), count in hints.items() if count} == {"accepted": 2, "lost": 1, "unreadable": 1}


def test_a_session_that_ends_becomes_one_lesson_under_which_every_turn_is_scored_through_a_kill(
    apps: Apps, teacher: str, tmp_path: Path
) -> None:
    prompt: dict[str, Any] = {"prompt_token_ids": int32_bytes([1, 2, 3])}
    talk = [
        turn("a", "Why do cats purr?", **prompt),
        turn("b", "Why do cats purr?", "answer of a", "Shorter!", **prompt),
        turn("c", "Why do cats purr?", "answer of a", "Shorter!", "answer of b", "Thanks.", **prompt),
    ]
    other = turn("d", "And dogs?", session="t", **prompt)
    with judge_in_thread([HANG, says(TELLS)]) as of_lessons:
        (tmp_path / "hinters.yaml").write_text(
            f'hinters: {{"*": {{kind: none}}}}\nlesson:\n  endpoint: {judge(of_lessons, 60)}\n'
        )
        options = ("--hinters", str(tmp_path / "hinters.yaml"), "--server", teacher)
        apps.start("experience", *options)
        apps.put(topics.SESSIONS, *talk, end())
        apps.wait(lambda: len(of_lessons.asked) == 1)
        apps.end("experience", kill=True)  # kill -9 while the judge thinks
        apps.start("experience", *options)

        def halves() -> dict[str, Hint]:
            return {half.hint_id: half for half in apps.read(topics.HALVES, Hint)}

        apps.wait(lambda: len(halves()) >= 3)
        assert len(of_lessons.asked) == 2
        apps.end("experience", kill=True)
        apps.start("experience", *options)
        apps.put(topics.SESSIONS, other, end("end of t", session="t"))
        apps.wait(lambda: len(halves()) >= 4)
        apps.end("experience")
    made, said = halves(), {turn_task_id(each.session_id, each.session_event_id): each for each in (*talk, other)}
    assert sorted(half.key for half in made.values()) == sorted(said)
    for half in made.values():
        assert (half.kind, half.hints, half.source) == (HintKind.ACCEPTED, (LESSON,), Source.RESULT)
        first = sum(said[half.key].session_event_id.encode()) % 1000
        expected = [0, 0, 0, *(-(first + i) / 100 for i in range(3))]
        assert float32_view(half.teacher_logprobs or b"").tolist() == pytest.approx(expected)
    shown = [body["messages"][1]["content"] for body in of_lessons.asked]
    assert "user: Thanks.\n\nassistant: answer of c" in shown[0] and shown[0] == shown[1]
