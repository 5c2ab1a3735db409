"""The environments llm and echo: the format of answers in steps, the steps on the log, and the rewards."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from schemas.records import Ending, Message, Result, Status, Task, Verifier
from tentalis.agents.environments import Environment, EnvironmentFault, EnvironmentOptions
from tentalis.agents.environments.echo import EchoEnvironment
from tentalis.agents.environments.llm import LlmEnvironment
from tentalis.agents.environments.registry import has_episodes, prepared_environment
from tentalis.agents.environments.step_tags import INSTRUCTIONS, steps_or_whole, tagged_steps
from tentalis.agents.workers.episodes import EpisodeLimits, EpisodePlayer
from tentalis.policies.served import ServedVersions
from tentalis.rewards import registry
from tentalis.rewards.steps import spans_of, steps_of
from tests.support.episode_server import EpisodeServer, decoded
from tests.support.loop_records import T0, ack, task
from tests.support.worker_lab import policy_calls

EXPERT = "<step>6 * 7 is 42.</step>\n<step>So\n\nit is 42.</step>\n<answer>42</answer>"

GYM_NUMBER = {"dataset": "chain_sum", "entry": {"question": "40 + 2 =", "answer": "42", "metadata": {}}}
GYM_WORD = {"dataset": "family_relationships", "entry": {"question": "?", "answer": "knave", "metadata": {}}}
BOX_IN_STEP = r"<step>First \boxed{{{}}}</step><answer>{}</answer>"


class Characters:
    """The tokenizer of EpisodeServer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return decoded([token for token in ids if token > 2])


def asked(environment: str, verifier: str, data: dict[str, Any], *messages: Message) -> Task:
    found = task(environment=environment, n=1, verifier=Verifier(name=verifier, data=json.dumps(data)))
    return found.model_copy(update={"messages": messages}) if messages else found


def answered(make: Callable[[EnvironmentOptions], Environment], of: Task, text: str, finish: str = "stop") -> Result:
    server = EpisodeServer(["assistant@v1"], lambda conversation, turn: text)
    server.finish_reason = finish
    result = played(make, of, server)
    assert len(server.prompts) == 1, "one turn"
    assert (INSTRUCTIONS in decoded(server.prompts[0])) == (of.environment == "llm")
    return result


def played(make: Callable[[EnvironmentOptions], Environment], of: Task, server: Any) -> Result:
    def no_wall() -> Any:
        raise AssertionError("an environment without actions asked for a wall")

    served = ServedVersions("local")
    served.apply(ack(1))
    player = EpisodePlayer(
        server,
        policy_calls(served, patience_s=0.1),
        lambda: make(EnvironmentOptions(no_wall)),
        EpisodeLimits(attempts=1),
        worker_id="w",
        server_id="local",
    )
    (result,) = asyncio.run(asyncio.wait_for(player.answer(of, T0), 60))
    return result


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("<step>a</step><step>b</step><answer>c</answer>", ("a", "b")),
        ("words <Step>\n a \n</sTEP> words <step> </step> <step>never closed", ("a",)),
        ("<step>outer <step>inner</step> rest</step>", ("outer <step>inner",)),
        ("</step>a<step>b</step>", ("b",)),
        ("<step>a < b > c & {d}</step>", ("a < b > c & {d}",)),
        ("no tags at all", ("no tags at all",)),
        ("<answer>42</answer>", ("<answer>42</answer>",)),
        ("", ()),
    ],
)
def test_steps_are_the_closed_blocks_or_the_whole_text(text: str, steps: tuple[str, ...]) -> None:
    assert steps_or_whole(text) == steps


def test_many_blocks_that_are_not_closed_cost_one_pass() -> None:
    assert tagged_steps("<step>" * 200_000 + "x") == ()


def test_the_steps_are_on_the_log_and_have_their_tokens() -> None:
    of = asked("llm", "gsm8k", {"answer": "#### 42"})
    result = answered(LlmEnvironment, of, EXPERT)
    assert (result.status, result.text) == (Status.OK, EXPERT), "the text keeps its tags, as its tokens do"
    assert result.steps == ("6 * 7 is 42.", "So\n\nit is 42.") == tuple(steps_of(result, 16))
    spans = spans_of(result, result.steps, Characters())
    assert spans is not None
    first, last = EXPERT.index("So"), len(result.response_token_ids) // 4
    prompt = len(result.prompt_token_ids) // 4
    assert spans == [(prompt, prompt + first), (prompt + first, prompt + last)]


@pytest.mark.parametrize(
    ("verifier", "data", "right", "wrong"),
    [
        ("gsm8k", {"answer": "#### 42"}, EXPERT, "<step>42</step><answer>41</answer>"),
        ("math", {"answer": r"\frac{1}{2}"}, r"<step>x</step><answer>\dfrac12</answer>", r"<answer>\frac13</answer>"),
        ("math", {"answer": "42"}, BOX_IN_STEP.format(41, 42), BOX_IN_STEP.format(42, 41)),
        ("gsm8k", {"answer": "42"}, BOX_IN_STEP.format(41, 42), BOX_IN_STEP.format(42, 41)),
        ("gsm8k", {"answer": "42"}, EXPERT, "<step>42</step><answer>none</answer>"),
        ("gsm8k", {"answer": "42"}, EXPERT + "<step>So the answer is 41</step>", "<step>42</step><answer> </answer>"),
        ("gsm8k", {"answer": "42"}, EXPERT, "<answer>41</answer><step>The answer is 42</step>"),
        ("math", {"answer": "42"}, EXPERT, r"<step>\boxed{42}</step><answer></answer>"),
        ("reasoning_gym", GYM_NUMBER, EXPERT, "<step>42</step><answer>none</answer>"),
        ("reasoning_gym", GYM_WORD, "<answer>The answer is knave.</answer>", "<step>knave</step><answer></answer>"),
        ("episode", {"answer": "42"}, EXPERT, "<step>42</step><answer>41</answer>"),
        ("episode", {"answer": "42"}, "42", "The number is 42."),
        ("episode", {"answer": "42"}, "<answer>The answer is 42</answer>", r"<answer>41</answer>\boxed{42}"),
    ],
)
def test_the_verifiers_grade_the_answer_and_not_the_steps(
    verifier: str, data: dict[str, Any], right: str, wrong: str
) -> None:
    of = asked("llm", verifier, data)
    rewards_of = [registry.verify(of, answered(LlmEnvironment, of, text)).reward for text in (right, wrong, "")]
    assert rewards_of == [1.0, 0.0, 0.0]


def test_a_truncated_answer_is_one_step() -> None:
    of = asked("llm", "episode", {"answer": "42"})
    result = answered(LlmEnvironment, of, "<step>a</step><step>b", finish="length")
    assert result.steps == ("<step>a</step><step>b",) and registry.verify(of, result).reward == 0.0


def test_without_a_reference_the_reward_is_unknown() -> None:
    of = asked("llm", "episode", {})
    verdict = registry.verify(of, answered(LlmEnvironment, of, EXPERT))
    assert verdict.reward is None and verdict.components["tagged_steps"] == 2.0


def test_bad_data_of_a_task_are_not_the_policys_fault() -> None:
    result = answered_by_fault(asked("llm", "episode", {"answer": [1]}))
    assert (result.status, result.error is not None and "answer" in result.error) == (Status.INFRA, True)


def answered_by_fault(of: Task) -> Result:
    served = ServedVersions("local")
    served.apply(ack(1))
    make = prepared_environment(of.environment)
    assert make is not None
    calls = policy_calls(served, patience_s=0.1)
    server: Any = EpisodeServer(["assistant@v1"], lambda text, turn: "")
    player = EpisodePlayer(server, calls, make, EpisodeLimits(attempts=1), worker_id="w", server_id="local")
    (result,) = asyncio.run(asyncio.wait_for(player.answer(of, T0), 60))
    return result


def test_echo_rewards_the_last_message_of_the_user_and_nothing_else() -> None:
    said = (
        Message(role="user", content="First."),
        Message(role="assistant", content="Yes."),
        Message(role="user", content=" Repeat\nthis. "),
    )
    of = asked("echo", "episode", {}, *said)
    turns = ("Repeat\nthis.", "First.", "")
    graded = [registry.verify(of, answered(EchoEnvironment, of, text)).reward for text in turns]
    assert graded == [1.0, 0.0, 0.0]
    assert answered(EchoEnvironment, of, "Repeat\nthis.").steps == ("Repeat\nthis.",)


def test_echo_plays_a_turn_for_each_message_and_rewards_each() -> None:
    of = asked("echo", "episode", {"then": ["Second.", "Third."]}, Message(role="user", content="First."))
    seen: list[str] = []

    def policy(conversation: str, turn: int) -> str:
        seen.append(conversation)
        return ("First.", " Third. ", "Third.")[turn]

    result = played(EchoEnvironment, of, EpisodeServer(["assistant@v1"], policy))
    assert [each.parts for each in result.step_rewards] == [{"reward": 1.0}, {"reward": 0.0}, {"reward": 1.0}]
    assert (result.ending, len(result.turns), result.rewards) == (Ending.DONE, 3, {"reward": pytest.approx(2 / 3)})
    assert "Second." not in seen[0] and "Second." in seen[1] and "Third." not in seen[1].replace(" Third. ", "")
    cut = EpisodeServer(["assistant@v1"], lambda conversation, turn: "First.")
    cut.finish_reason = "length"
    assert played(EchoEnvironment, of, cut).rewards == {"reward": 0.0}, "no turn was right in time"


def test_a_task_that_says_nothing_cannot_be_echoed() -> None:
    of = asked("echo", "episode", {}, Message(role="system", content="Say something."))
    with pytest.raises(EnvironmentFault, match="no message of the user"):
        asyncio.run(EchoEnvironment(EnvironmentOptions(lambda: None)).reset(of))  # type: ignore[arg-type,return-value]


def test_both_are_known() -> None:
    assert has_episodes("echo") and has_episodes("llm")
    registry.check_environment("echo")
    registry.check_environment("llm")
