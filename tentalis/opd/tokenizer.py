"""Whether two servers read and write the same tokens: a teacher's log-probs of the student's tokens mean nothing else.

Compared over the servers' own endpoints, since that is what will be used: what every token id stands for, special ones
included; the tokens of a probe text, with and without the special tokens that the tokenizer adds, and with the special
tokens of the template written out in it; the tokens of a short conversation under the chat template, up to where the
assistant's answer begins. Another template would teach an answer that follows, and ends with, other tokens.
"""

from collections.abc import Sequence
from typing import Protocol

from tentalis.inference.protocol import Int32, Message, RequestRefused
from tentalis.service import Unmendable

CHUNK = 1024
"""Token ids whose texts are compared at a time."""
MOST = 2**21
"""Token ids that are compared at most: a server that gives a text for every number has no end."""

PROBE = (
    "It's 12,345.678 km — naïve façade, ÅNGSTRÖM, don't!\n\n\tdef f(x):\n        return {'a': [1, 2]}  # 100%\r\n"
    "日本語のテキスト、한국어, العربية, Ελληνικά, русский 🙂👩‍🔬 \\boxed{42} https://example.org/?q=1&r=2   "
)
CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "Why do cats purr?"},
    {"role": "assistant", "content": "Because they are content."},
    {"role": "user", "content": "And dogs?\n\n[user's hint / instruction]\nAnswer in one sentence."},
)


class OtherTokenizer(Unmendable):
    """The teacher's tokens are not the student's."""


class Tokens(Protocol):
    """A server's tokenizer; tentalis.inference.client.OpenAIClient is one. All raise InferenceError."""

    base_url: str

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Int32:
        """Token ids of a text, int32 [n]."""
        ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""
        ...

    async def render(self, model: str, messages: Sequence[Message], add_generation_prompt: bool = True) -> Int32:
        """The token ids that the chat template makes of messages, int32 [n]."""
        ...


async def check_same_tokens(student: Tokens, student_model: str, teacher: Tokens, teacher_model: str) -> None:
    """Returns if a teacher can be asked about the student's tokens.

    Raises:
        OtherTokenizer: it cannot; the message says in what they differ.
        InferenceError: one of the servers cannot be asked.
    """
    here, there = _Side(student, student_model), _Side(teacher, teacher_model)

    def refuse(what: str) -> OtherTokenizer:
        return OtherTokenizer(
            f"{there} cannot teach {here}: {what}. Its log-probs would be about other tokens than those that were "
            "sampled. Name a teacher with the same tokenizer and chat template"
        )

    for special in (False, True):
        ours, theirs = await here.tokens(PROBE, special), await there.tokens(PROBE, special)
        if ours != theirs:
            kind = "with the special tokens that are added" if special else "without special tokens"
            raise refuse(f"a probe text has other tokens, {kind} ({_first_difference(ours, theirs)})")
    prompt, theirs_prompt = await here.prompt(), await there.prompt()
    if prompt != theirs_prompt:
        raise refuse(
            f"the chat template makes another prompt of the same messages ({_first_difference(prompt, theirs_prompt)})"
        )
    written = await student.detokenize(student_model, prompt)
    ours, theirs = await here.tokens(written, False), await there.tokens(written, False)
    if ours != theirs:
        raise refuse(f"the special tokens of the chat template are not the same ({_first_difference(ours, theirs)})")
    for first in range(0, MOST, CHUNK):
        text, other = await here.texts(first), await there.texts(first)
        if text != other:
            raise refuse(f"not all of the token ids {first} to {first + CHUNK - 1} stand for the same text")
        if not text:
            return


class _Side:
    """One server and model."""

    def __init__(self, server: Tokens, model: str) -> None:
        self._server = server
        self._model = model
        self._end = MOST

    def __str__(self) -> str:
        return f"{self._model} at {self._server.base_url}"

    async def tokens(self, text: str, special: bool) -> list[int]:
        return [int(token) for token in await self._server.tokenize(self._model, text, special)]

    async def prompt(self) -> list[int]:
        try:
            return [int(token) for token in await self._server.render(self._model, CONVERSATION)]
        except RequestRefused as error:
            if error.status != 400:
                raise
            raise OtherTokenizer(f"{self} renders no conversation as a prompt: {error.message}") from error

    async def texts(self, first: int) -> str:
        """The text of CHUNK ids from `first` on; of those beyond the vocabulary none.

        Servers either refuse such ids or give no text for them; a vocabulary may be padded to any size.
        """
        if first >= self._end:
            return ""
        try:
            return await self._text(first, first + CHUNK)
        except RequestRefused as error:
            if error.status not in (400, 422):
                raise
        known, refused = first, first + CHUNK  # the first id that is refused lies in (known, refused], or is `first`
        while known < refused:
            middle = (known + refused) // 2
            try:
                await self._text(middle, middle + 1)
                known = middle + 1
            except RequestRefused as error:
                if error.status not in (400, 422):
                    raise
                refused = middle
        self._end = known
        return await self._text(first, known) if known > first else ""

    async def _text(self, first: int, end: int) -> str:
        return await self._server.detokenize(self._model, range(first, end))


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"{len(ours)} and {len(theirs)} tokens, the first difference at number {at}"
