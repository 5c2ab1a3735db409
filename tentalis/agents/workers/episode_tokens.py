"""The tokens of one episode: they grow by appending, each with its log-prob, mask and policy. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.records import LogprobsMode, PolicySpan, StepReward, TurnSpan
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.inference.protocol import Completion, Int32


@dataclass(slots=True)
class EpisodeTokens:
    """The prompt of the first turn, and after it the response: tokens of the policy (mask 1) and of the environment
    (mask 0) in the order in which the model saw them.

    `mode`: the distribution of all log-probs; NONE as soon as a turn has none, UNKNOWN if the turns differ.
    """

    prompt: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    mask: bytearray = field(default_factory=bytearray)
    logprobs: list[float] = field(default_factory=list)
    mode: LogprobsMode | None = None
    spans: list[PolicySpan] = field(default_factory=list)
    turns: list[TurnSpan] = field(default_factory=list)
    step_rewards: list[StepReward] = field(default_factory=list)
    rendered_turns: list[int] = field(default_factory=list)
    n_turns: int = 0

    @property
    def context(self) -> list[int]:
        """The prompt of the next turn: all tokens so far."""
        return self.prompt + self.response

    def begin(self, prompt: Sequence[int]) -> None:
        """Sets the prompt of the first turn."""
        self.prompt = [int(token) for token in prompt]

    def render_anew(self, prompt: Sequence[int]) -> None:
        """Begins again with a prompt that does not extend the tokens so far. The earlier turns are dropped from the
        tokens; `rendered_turns` names the turn that begins here."""
        self.begin(prompt)
        self.rendered_turns.append(self.n_turns)
        self.response, self.mask, self.logprobs, self.mode = [], bytearray(), [], None
        self.spans, self.turns, self.step_rewards = [], [], []

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends tokens of the environment."""
        self.response += [int(token) for token in tokens]
        self.mask += bytes(len(tokens))
        self.logprobs += [0.0] * len(tokens)

    def sample(self, completion: Completion, policy: str, mode: LogprobsMode) -> None:
        """Appends a turn of the policy. The completion must have token ids."""
        assert completion.token_ids is not None
        start, n = len(self.response), len(completion.token_ids)
        self.response += completion.token_ids.tolist()
        self.mask += b"\1" * n
        known = completion.logprobs is not None
        self.logprobs += completion.logprobs.tolist() if completion.logprobs is not None else [0.0] * n
        mode = mode if known else LogprobsMode.NONE
        if self.mode in (None, mode):
            self.mode = mode
        elif LogprobsMode.NONE in (self.mode, mode):
            self.mode = LogprobsMode.NONE
        else:
            self.mode = LogprobsMode.UNKNOWN
        if not self.spans or self.spans[-1].policy != policy:
            self.spans.append(PolicySpan(start=start, policy=policy))
        self.turns.append(TurnSpan(start=start, end=start + n, finish_reason=completion.finish_reason))
        self.n_turns += 1

    def reward(self, parts: dict[str, float]) -> None:
        """Adds the reward parts of the last turn."""
        turn = self.turns[-1]
        self.step_rewards.append(StepReward(start=turn.start, end=turn.end, parts=parts))

    def fields(self) -> dict[str, object]:
        """Returns the token fields of the result. Tokens of the environment after the last turn are left out."""
        n = self.turns[-1].end if self.turns else 0
        mask = bytes(self.mask[:n])
        mode = self.mode or LogprobsMode.NONE
        return {
            "prompt_token_ids": int32_bytes(self.prompt),
            "response_token_ids": int32_bytes(self.response[:n]),
            "sampler_logprobs": b"" if mode is LogprobsMode.NONE else float32_bytes(self.logprobs[:n]),
            "logprobs_mode": mode,
            "loss_mask": b"" if all(mask) else mask,
            "policy_spans": tuple(self.spans),
            "turns": tuple(self.turns),
            "step_rewards": tuple(self.step_rewards),
            "rendered_turns": tuple(self.rendered_turns),
            "finish_reason": self.turns[-1].finish_reason if self.turns else "",
        }


def appended_tokens(answered: Sequence[Int32], continued: Sequence[Int32], end_token: int) -> list[int] | None:
    """Returns the tokens that follow a turn which ended with `end_token`, up to the next turn; None if the chat
    template cannot append.

    The arguments are renderings of a probe, int32 [n] each: `answered` of a question with two different answers,
    `continued` of the same with the new messages and the beginning of the next turn. The template appends if each
    `continued` begins with its `answered`, and if after `end_token` the same tokens follow both answers.
    """
    found: list[list[int]] = []
    for before, after in zip(answered, continued, strict=True):
        ends = np.flatnonzero(before == end_token)
        if not len(ends) or not np.array_equal(after[: len(before)], before):
            return None
        found.append(after[int(ends[-1]) + 1 :].tolist())
    return found[0] if found[0] and all(each == found[0] for each in found) else None
