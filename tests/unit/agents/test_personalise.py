"""The counts and charts of the personalisation scenario, without a stack."""

from __future__ import annotations

import itertools
import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from schemas.records import EvalResult, OutcomeKind, Record
from tests.bench import personalise
from tests.bench.personalise import (
    Loop,
    Options,
    Talk,
    converged_after,
    converged_by_chance,
    converged_share,
    mean_by_chance,
    now_in,
    summary,
    talk,
    untrained,
    wilson,
    write_page,
)
from tests.bench.users import USERS
from tests.support.loop_records import RUN, ack, lost, manifest, outcome, plan, step_result, task


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_convergence_is_the_end_of_the_first_long_enough_row(fits: list[bool], in_a_row: int) -> None:
    ends = [at for at in range(in_a_row, len(fits) + 1) if all(fits[at - in_a_row : at])]
    assert converged_after(fits, in_a_row) == (ends[0] if ends else None)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_wilsons(of: tuple[int, int]) -> None:
    hits, n = of
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_no_two_sessions_of_a_run_begin_alike() -> None:
    assert len({now_in(seed, session) for seed in range(3) for session in range(100)}) == 300


@given(st.floats(0.05, 1.0), st.integers(1, 4))
def test_chance_converges_as_counting_does(share: float, in_a_row: int) -> None:
    shares = converged_by_chance(share, 12, in_a_row)
    for at in (1, 5, 12):
        by_counting = sum(
            share ** sum(fits) * (1 - share) ** (at - sum(fits))
            for fits in itertools.product((False, True), repeat=at)
            if converged_after(fits, in_a_row)
        )
        assert shares[at - 1] == pytest.approx(by_counting, abs=1e-9)


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_the_mean_by_chance_is_that_of_its_distribution(share: float) -> None:
    done = converged_by_chance(share, 4_000)
    assert mean_by_chance(share) == pytest.approx(sum(1 - at for at in [0.0, *done]), rel=1e-6)
    assert mean_by_chance(0.0) == math.inf


def test_runs_that_were_given_up_do_not_count_against_those_that_went_on() -> None:
    assert converged_share([4, 4], [4, 4]) == [0, 0, 0, 1]
    assert converged_share([3, None], [3, 5]) == [0, 0, 0.5, 0.5, 0.5]
    assert converged_share([None, 5], [2, 5]) == [0, 0, 0, 0, 1]
    assert converged_share([3], [9]) == [0, 0, 1], "what a run does after it has converged"


def test_the_untrained_share_is_of_the_sessions_that_every_run_has() -> None:
    def run(*fits: tuple[bool, int | None]) -> dict[str, Any]:
        rows = [{"user": "student", "first_fits": fit, "versions": [at, at]} for fit, at in fits]
        return {"method": "rl", "sessions": rows}

    soon, late = run((True, 0), (True, 0), (True, 0)), run((False, 0), (True, 0), (False, 1), (True, 0), (True, None))
    assert untrained([soon, late], "student") == (4, 5)
    assert untrained([soon], "teacher") == (0, 0)
    assert untrained([late | {"method": "none"}], "student") == (3, 4), "and of all of the control"


def test_the_loop_settles_when_all_that_was_said_is_learned_and_served() -> None:
    loop = Loop(RUN)
    turns = [task(f"t{at}", n=1) for at in range(2)]
    loop.apply(manifest(first=1))
    assert not loop.serves
    for record in (ack(1), outcome(turns[0])):
        loop.apply(record)
    assert loop.serves and loop.unsettled(2, batch=2) == "1 of 2 turns are decided"
    story: list[tuple[Record, str | None]] = [
        (outcome(turns[1]), "2 rollouts wait for the trainer"),
        (plan(1, ["t0/0", "t1/0"]), "step 1 is being trained"),
        (step_result(1, 2), "1 steps are trained, 0 are served"),
        (ack(2), None),
    ]
    for record, why in story:
        loop.apply(record)
        assert loop.unsettled(2, batch=2) == why
    assert loop.steps == 1


def test_a_turn_is_counted_once_and_one_that_came_to_nothing_does_not_wait_for_training() -> None:
    loop = Loop(RUN)
    turn, empty = task("t0", n=1), task("t1", n=1)
    late = outcome(turn, kind=OutcomeKind.LATE, outcome_key="t0/0/late/h")
    for record in (manifest(), ack(1), outcome(turn), outcome(turn), lost(empty, kind=OutcomeKind.EMPTY), late):
        loop.apply(record)
    assert loop.unsettled(2, batch=2) is None
    assert dict(loop.outcomes) == {"both": 1, "empty": 1} and dict(loop.rewards) == {"+1": 1}
    assert loop.unsettled(3, batch=2) == "2 of 3 turns are decided"


def verdict(version: int, passed: bool, policy: str = "assistant") -> EvalResult:
    return EvalResult(
        eval_id=f"{policy}-{version}",
        event_time=0,
        experiment="guard",
        scenario=RUN,
        policy=f"{policy}@v{version}",
        passed=passed,
    )


def test_a_refused_version_is_waited_for_until_the_branch_after_it_is_served() -> None:
    loop = Loop(RUN)
    branch = f"{RUN}.1"
    story: list[tuple[Record, str | None]] = [
        (manifest(first=1), None),
        (ack(1), None),
        (plan(1, ["t0/0"]), "step 1 is being trained"),
        (step_result(1, 2), "1 steps are trained, 0 are served"),
        (verdict(2, passed=False), "1 steps are trained, 0 are served"),
        (verdict(3, passed=False, policy="other"), "1 steps are trained, 0 are served"),
        (manifest(branch, first=3), "0 steps are trained, 0 are served"),
        (ack(3), None),
        (plan(1, ["t0/0"], run_id=branch), "step 1 is being trained"),
        (step_result(1, 4, run_id=branch), "1 steps are trained, 0 are served"),
        (verdict(4, passed=True), "1 steps are trained, 0 are served"),
        (ack(4), None),
        (plan(1, ["x"], run_id=f"{RUN}-other"), None),
    ]
    for record, why in story:
        loop.apply(record)
        assert loop.unsettled(0, batch=1) == why, record
    assert (loop.steps, loop.trained, dict(loop.verdicts)) == (1, 2, {"refused": 1, "passed": 1})


def test_a_user_gives_a_thumb_before_each_reply() -> None:
    asked: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body))
            turns = sum(path == "/v1/chat/completions" for path, _ in asked)
            text = "No. It is wrong, I am afraid." if turns == 1 else "Well done, that is a good try, keep it up!"
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {"id": f"c{turns}", "object": "chat.completion", "created": 1, "model": "assistant@v1"}
            data = json.dumps(answer | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("x-request-id", f"r{turns}")
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        talk(url, USERS["teacher"], 0, 0, leaves=False, thumbs=True)
        thumbs = [(at, body) for at, (path, body) in enumerate(asked) if path == "/v1/feedback"]
        assert thumbs == [
            (1, {"completion_id": "r1", "thumb": "down"}),
            (3, {"completion_id": "r2", "thumb": "up"}),
        ]
        asked.clear()
        talk(url, USERS["teacher"], 0, 0, leaves=False)
        assert {path for path, _ in asked} == {"/v1/chat/completions"}
        server.shutdown()


def test_another_policys_records_mean_nothing() -> None:
    loop = Loop(RUN)
    for record in (
        manifest(),
        ack(7, policy="other"),
        plan(1, ["x"], run_id="other"),
        outcome(task("t", policy="other")),
    ):
        loop.apply(record)
    assert not loop.serves and loop.unsettled(0, batch=1) is None


def held(session: int, fits: bool) -> Talk:
    return Talk(
        user="student",
        session=session,
        said=("Why?", "Thanks!"),
        answers=("Because of the tree.", "You are welcome."),
        versions=(session, None),
        first_fits=fits,
        content=True,
        first_words=4,
        first_on_topic=True,
        seconds=1.26,
    )


def test_what_is_kept_of_a_run_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personalise, "FOLDER", tmp_path)
    for seed, fits in enumerate(([True] * 3, [False, True] * 6)):
        options = Options("hybrid", (USERS["student"],), seed, sessions=12)
        talks = [held(at, fit) for at, fit in enumerate(fits)]
        kept = summary(options, talks, Loop(RUN), 10.0, "run_id: x")
        assert [("said" in row) for row in kept["sessions"]].count(True) == min(len(fits), 6), "some words, not all"
        (tmp_path / f"{options.name}.json").write_text(json.dumps(kept), encoding="utf-8")
    write_page()
    assert (tmp_path / "curves.png").stat().st_size > 1000
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| student | hybrid | student | 2 | 3, > 12 | 50% (9% to 91%) to 62% (36% to 82%) | 4 to 4 |" in page
    assert "student                 hybrid  seed 1  .x.x.x.x.x.x\n" in page
    assert (
        "- student: 1 of 2 first answers of the untrained model meet the rule (9% to 91%); by chance that takes 14 "
        in page
    )
