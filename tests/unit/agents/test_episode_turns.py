"""The join of a program's recorded turns: branches, side calls, and answers that were not sampled freely."""

import pytest

from schemas.records import LogprobsMode, Message, Sampling, SessionEvent
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.agents.workers.episode_turns import JoinedTurns, NothingSampled, joined_turns


def turn(name: str, prompt: list[int], response: list[int], **fields: object) -> SessionEvent:
    given: dict[str, object] = {
        "session_event_id": name,
        "event_time": 1,
        "session_id": "episode/t/0/1-a",
        "turn_type": "episode",
        "model": "assistant@v1",
        "messages": (Message(role="user", content="?"),),
        "response": name,
        "prompt_token_ids": int32_bytes(prompt),
        "response_token_ids": int32_bytes(response),
        "sampler_logprobs": float32_bytes([-0.5] * len(response)),
        "logprobs_mode": LogprobsMode.PROCESSED,
        "policy": "assistant",
        "finish_reason": "stop",
    }
    return SessionEvent.model_validate(given | fields)


def names(joined: JoinedTurns) -> list[str]:
    return [each.response for each in joined.turns]


FIRST = turn("first", [1, 2], [3, 4])
SECOND = turn("second", [1, 2, 3, 4, 5], [6])
SIDE = turn("side", [9, 9], [7] * 50)


def test_turns_whose_prompts_grow_are_one_episode_with_a_mask() -> None:
    joined = joined_turns([FIRST, SECOND], Sampling())
    tokens = joined.tokens
    assert (tokens.prompt, tokens.response, list(tokens.mask)) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert [(each.start, each.end) for each in tokens.turns] == [(0, 2), (3, 4)]
    assert tokens.logprobs == [-0.5, -0.5, 0.0, -0.5] and tokens.rendered_turns == []
    assert names(joined) == ["first", "second"] and joined.left_out == 0


def test_a_long_side_call_does_not_push_the_conversation_out() -> None:
    joined = joined_turns([SIDE, FIRST, SECOND], Sampling())
    assert names(joined) == ["first", "second"] and joined.left_out == 1
    assert joined.tokens.rendered_turns == [1], "the first turn, and the one that does not continue it"
    assert names(joined_turns([FIRST, SIDE], Sampling())) == ["side"], "of two single turns, the longer one"


def test_of_two_branches_the_longer_one_is_the_episode() -> None:
    other = turn("other", [1, 2, 3, 4, 8], [6, 6])
    third = turn("third", [1, 2, 3, 4, 5, 6, 7], [8])
    joined = joined_turns([FIRST, SECOND, other, third], Sampling())
    assert names(joined) == ["first", "second", "third"] and joined.left_out == 1
    assert names(joined_turns([FIRST, SECOND, other], Sampling())) == ["first", "other"]


def test_an_answer_that_was_said_twice_continues_the_newer_one() -> None:
    again = turn("again", [1, 2], [3, 4], model="assistant@v2")
    joined = joined_turns([FIRST, again, SECOND], Sampling())
    assert names(joined) == ["again", "second"]
    assert [(span.start, span.policy) for span in joined.tokens.spans] == [(0, "assistant@v2"), (3, "assistant@v1")]


def test_a_prompt_that_was_shortened_begins_anew() -> None:
    compacted = turn("compacted", [1, 9], [3])
    joined = joined_turns([FIRST, SECOND, compacted], Sampling())
    assert names(joined) == ["first", "second"] and joined.tokens.rendered_turns == [2]


def test_an_answer_that_a_grammar_constrained_is_seen_and_not_trained_on() -> None:
    forced = turn("forced", [1, 2], [3, 4], not_trainable="a grammar or a forced tool constrained the sampling")
    tokens = joined_turns([forced, SECOND], Sampling()).tokens
    assert (tokens.response, list(tokens.mask)) == ([3, 4, 5, 6], [0, 0, 0, 1])
    assert [(each.start, each.end) for each in tokens.turns] == [(3, 4)]
    with pytest.raises(NothingSampled, match="a grammar"):
        joined_turns([forced], Sampling())


def test_greedy_answers_of_a_greedy_task_are_the_policys() -> None:
    greedy = turn("greedy", [1, 2], [3, 4], not_trainable="sampled greedily (temperature 0)")
    assert list(joined_turns([greedy], Sampling(temperature=0.0)).tokens.mask) == [1, 1]


def test_turns_without_tokens_are_no_episode() -> None:
    without = turn("without", [], [], sampler_logprobs=b"", not_trainable="the backend gives no token ids")
    with pytest.raises(NothingSampled, match="gives no token ids"):
        joined_turns([without], Sampling())
    with pytest.raises(NothingSampled, match="no tokens"):
        joined_turns([], Sampling())
