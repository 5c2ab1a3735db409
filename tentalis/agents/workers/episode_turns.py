"""Joins the recorded turns of a program into the tokens of one episode. Pure.

A program may call the model beside its conversation, branch it, or begin it again with a shorter prompt. So the turns
form trees: a turn continues the turn whose prompt and answer are the longest beginning of its own prompt. The way with
the most turns of the policy is the episode, of equal ones the way with the most tokens; the turns on other ways are
left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.bounds import trainable_temperature
from schemas.records import Sampling, SessionEvent
from schemas.tensors import float32_view, int32_view
from tentalis.agents.workers.episode_tokens import EpisodeTokens
from tentalis.inference.protocol import Completion


class NothingSampled(ValueError):
    """No turn has tokens that the policy sampled. The message has the reason of the first turn."""


@dataclass(frozen=True, slots=True)
class JoinedTurns:
    """An episode: its tokens, its turns in order, and the number of turns that are left out."""

    tokens: EpisodeTokens
    turns: tuple[SessionEvent, ...]
    left_out: int


def joined_turns(turns: Sequence[SessionEvent], sampling: Sampling) -> JoinedTurns:
    """Returns the episode of the turns of one session, in the order of the log. `sampling`: of the task.

    Answers that cannot be trained on, such as those that a grammar constrained, count as tokens of the environment; all
    count as the policy's if the task itself asks for sampling that is not trained on. `rendered_turns` of the tokens
    are the turns, from 0, whose prompts continue no earlier turn. Raises NothingSampled.
    """
    whole = [turn.prompt_token_ids + turn.response_token_ids for turn in turns]
    chosen = [_is_chosen(turn, sampling) for turn in turns]
    parents = [_parent(turn, whole[:number], turns) for number, turn in enumerate(turns)]
    weights: list[tuple[int, int]] = []
    for number, parent in enumerate(parents):
        n_turns, n_bytes = (0, 0) if parent is None else weights[parent]
        own = (1, len(turns[number].response_token_ids)) if chosen[number] else (0, 0)
        weights.append((n_turns + own[0], n_bytes + own[1]))
    last = max(range(len(turns)), key=lambda number: (weights[number], number), default=None)
    if last is None or not weights[last][0]:
        reason = next((turn.not_trainable for turn in turns if turn.not_trainable), "") or "the turns have no tokens"
        raise NothingSampled(f"no turn has tokens that the policy sampled: {reason}")
    way = _way(last, parents)
    tokens = EpisodeTokens()
    tokens.begin(int32_view(turns[way[0]].prompt_token_ids).tolist())
    tokens.rendered_turns = [number for number, parent in enumerate(parents) if number and parent is None]
    for number in way:
        turn = turns[number]
        prompt = int32_view(turn.prompt_token_ids).tolist()
        tokens.observe(prompt[len(tokens.context) :])
        if chosen[number]:
            tokens.sample(_completion(turn), turn.model or turn.policy, turn.logprobs_mode)
        else:
            tokens.observe(int32_view(turn.response_token_ids).tolist())
    return JoinedTurns(tokens, tuple(turns[number] for number in way), len(turns) - len(way))


def _is_chosen(turn: SessionEvent, sampling: Sampling) -> bool:
    """Returns True if the policy sampled the answer of a turn as the task says."""
    if not turn.prompt_token_ids or not turn.response_token_ids:
        return False
    plain = trainable_temperature(sampling.temperature) and sampling.top_p == 1.0 and sampling.top_k == 0
    return not turn.not_trainable or not plain


def _parent(turn: SessionEvent, whole: Sequence[bytes], turns: Sequence[SessionEvent]) -> int | None:
    """Returns the earlier turn that a turn continues: of several, the one with the longest beginning, the newest of
    equal ones."""
    found: int | None = None
    for number, before in enumerate(whole):
        longer = found is None or len(before) >= len(whole[found])
        if turns[number].response_token_ids and longer and turn.prompt_token_ids.startswith(before):
            found = number
    return found


def _way(last: int, parents: Sequence[int | None]) -> list[int]:
    """Returns the turns from a root to `last`."""
    way = [last]
    while (parent := parents[way[-1]]) is not None:
        way.append(parent)
    return way[::-1]


def _completion(turn: SessionEvent) -> Completion:
    logprobs = float32_view(turn.sampler_logprobs) if turn.sampler_logprobs else None
    return Completion(turn.response, int32_view(turn.response_token_ids), logprobs, turn.finish_reason)
