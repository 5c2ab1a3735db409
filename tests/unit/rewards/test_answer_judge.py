"""The answer judge: grades of a model by a criterion."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from schemas.records import Verifier
from tentalis.learning.errors import LearnError
from tentalis.learning.options import LearnOptions
from tentalis.learning.runs import first_model, judge_of, kind_of
from tentalis.rewards.answer_judge import AnswerJudge, AnswerJudgeSettings
from tentalis.rewards.chat import ChatClient, ChatEndpoint
from tentalis.rewards.scorer_file import BadScorers, load_scorers
from tentalis.rewards.verdict import BadVerifierData, Verdict
from tentalis.rewards.votes import NoVote
from tests.support.judge_server import Reply, judge_server, says
from tests.support.loop_records import result, task


def judged(replies: list[Reply], votes: int = 1, **more: Any) -> Verdict:
    async def ask() -> Verdict:
        async with judge_server(replies) as server:
            chat = ChatClient(ChatEndpoint(url=server.url, model="judge"), {})
            settings = AnswerJudgeSettings(kind="answer", judge="judge", votes=votes, temperature=0.5, **more)
            async with chat:
                return await AnswerJudge(chat, settings).judge(task(), result(task(), text="an answer"))

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("replies", "votes", "reward", "read"),
    [
        ([says(r"good \boxed{10}")], 1, 1.0, 1),
        ([says(r"\boxed{0}")], 1, 0.0, 1),
        ([says(r"\boxed{4}"), says(r"\boxed{8}"), says("nothing")], 3, 0.6, 2),
        ([says(r"\boxed{-3}")], 1, None, 0),
        ([says(r"\boxed{9} so \boxed{eleven}")], 1, None, 0),
    ],
)
def test_the_reward_is_the_mean_of_the_grades_that_can_be_read(
    replies: list[Reply], votes: int, reward: float | None, read: int
) -> None:
    verdict = judged(replies, votes)
    assert verdict.reward == (None if reward is None else pytest.approx(reward))
    assert verdict.components["votes_read"] == read


def test_no_answer_is_no_grade() -> None:
    with pytest.raises(NoVote):
        judged([Reply(500)])


def test_another_criterion_is_another_scorer() -> None:
    chat = ChatClient(ChatEndpoint(url="http://judge", model="judge"), {})
    given = [AnswerJudgeSettings(kind="answer", judge="j", criterion=text) for text in ("a", "b", "b")]
    assert len({AnswerJudge(chat, settings).name for settings in given}) == 2
    of = task().model_copy(update={"verifier": Verifier(name="reward", data='{"rows": 1}')})
    with pytest.raises(BadVerifierData):
        AnswerJudge(chat, AnswerJudgeSettings(kind="answer", judge="j")).check(of)


def test_several_votes_need_a_temperature(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "judges: {j: {url: 'http://judge', model: m}}\n"
        "environments: {chat: {style: {kind: answer, judge: j, votes: 3}}}\n"
    )
    with pytest.raises(BadScorers, match="at temperature 0 3 votes are equal"):
        load_scorers(tmp_path / "s.yaml", {})


def test_a_run_has_functions_or_a_judge() -> None:
    for options in (LearnOptions("p", ()), LearnOptions("p", ("r.py:f",), judge="http://judge")):
        with pytest.raises(LearnError, match=r"reward functions .* or a judge .* not both"):
            judge_of(options)
    kind = kind_of(LearnOptions("p", (), judge="http://judge", criterion="kind"))
    assert kind["judge"]["criterion"] == "kind" and kind["judge"]["endpoint"]["model"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LearnOptions("p", ("r.py:f",), judge_model="m"), "--judge-model is of a judge: .* --judge"),
        (LearnOptions("p", ("r.py:f",), judge_key_env="K"), "--judge-key-env is of a judge"),
        (LearnOptions("p", ("r.py:f",), criterion="kind"), "--criterion is of a judge"),
        (LearnOptions("p", (), judge="http://judge", reward_range=(0, 5)), "--reward-range is of reward functions"),
    ],
)
def test_options_that_nothing_reads_are_refused(options: LearnOptions, words: str) -> None:
    with pytest.raises(LearnError, match=words):
        judge_of(options)


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://127.0.0.1:1", "lists no models .* name its model with --judge-model"), ("ftp://judge", "--judge: url")],
)
def test_a_judge_that_does_not_answer_is_named(url: str, words: str) -> None:
    with pytest.raises(LearnError, match=words):
        first_model({"url": url, "model": None, "api_key_env": None})


def test_a_key_that_is_not_set_is_named() -> None:
    with pytest.raises(LearnError, match="--judge-key-env: NO_SUCH_KEY is not set"):
        first_model({"url": "http://judge", "model": None, "api_key_env": "NO_SUCH_KEY"})
