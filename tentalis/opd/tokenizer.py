"""Checks that two servers use the same tokens. Otherwise a teacher's log-probs of the student's tokens mean nothing.

The check uses the servers' own endpoints, as scoring will. It compares the text of every token id, special ones
included; the tokens of a probe text, with and without the special tokens that the tokenizer adds; the tokens of a short
conversation under the chat template, up to the beginning of the assistant's answer; and the tokens of that prompt
written out as text. A different template would teach an answer that follows, and ends with, other tokens.
"""

from collections.abc import Sequence
from typing import Protocol

from tentalis.inference.protocol import Int32, Message, RequestRefused
from tentalis.service.lifecycle import Unmendable

IDS_PER_CALL = 1024
"""Token ids whose texts are compared per call."""
MAX_TOKEN_IDS = 2**21
"""The most token ids to compare: a server may return a text for every number."""

PROBE_TEXT = (
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


class ServerTokenizer(Protocol):
    """A server's tokenizer; tentalis.inference.client.OpenAIClient implements it. All methods raise InferenceError."""

    base_url: str

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Int32:
        """Token ids of a text, int32 [n]."""
        ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""
        ...

    async def render(self, model: str, messages: Sequence[Message], add_generation_prompt: bool = True) -> Int32:
        """Token ids of messages under the chat template, int32 [n]."""
        ...


async def check_same_tokens(
    student: ServerTokenizer, student_model: str, teacher: ServerTokenizer, teacher_model: str
) -> None:
    """Checks that a teacher can score the student's tokens.

    Raises:
        OtherTokenizer: it cannot; the message names the difference.
        InferenceError: a call to one of the servers failed.
    """
    student_side, teacher_side = _ServerModel(student, student_model), _ServerModel(teacher, teacher_model)

    def difference(problem: str) -> OtherTokenizer:
        return OtherTokenizer(
            f"{teacher_side} cannot teach {student_side}: {problem}. Its log-probs would be about other tokens than "
            "the sampled ones. Choose a teacher with the same tokenizer and chat template"
        )

    for special in (False, True):
        student_tokens, teacher_tokens = (
            await student_side.tokens(PROBE_TEXT, special),
            await teacher_side.tokens(PROBE_TEXT, special),
        )
        if student_tokens != teacher_tokens:
            kind = "with the special tokens that the tokenizer adds" if special else "without special tokens"
            raise difference(
                f"a probe text has different tokens, {kind} ({_first_difference(student_tokens, teacher_tokens)})"
            )
    student_prompt, teacher_prompt = await student_side.prompt(), await teacher_side.prompt()
    if student_prompt != teacher_prompt:
        raise difference(
            f"the chat template makes another prompt of the same messages "
            f"({_first_difference(student_prompt, teacher_prompt)})"
        )
    prompt_text = await student.detokenize(student_model, student_prompt)
    student_tokens, teacher_tokens = (
        await student_side.tokens(prompt_text, False),
        await teacher_side.tokens(prompt_text, False),
    )
    if student_tokens != teacher_tokens:
        raise difference(
            f"the special tokens of the chat template differ ({_first_difference(student_tokens, teacher_tokens)})"
        )
    for first_id in range(0, MAX_TOKEN_IDS, IDS_PER_CALL):
        text, teacher_text = await student_side.texts(first_id), await teacher_side.texts(first_id)
        if text != teacher_text:
            raise difference(
                f"some of the token ids {first_id} to {first_id + IDS_PER_CALL - 1} stand for different texts"
            )
        if not text:
            return


class _ServerModel:
    """A model on a server."""

    def __init__(self, server: ServerTokenizer, model: str) -> None:
        self._server = server
        self._model = model
        self._end = MAX_TOKEN_IDS

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
            raise OtherTokenizer(f"{self} cannot render a conversation as a prompt: {error.message}") from error

    async def texts(self, first: int) -> str:
        """The text of IDS_PER_CALL ids from `first` on; ids beyond the vocabulary add nothing.

        Servers either refuse such ids or return no text for them; a vocabulary may be padded to any size.
        """
        if first >= self._end:
            return ""
        try:
            return await self._text(first, first + IDS_PER_CALL)
        except RequestRefused as error:
            if error.status not in (400, 422):
                raise
        known, refused = (
            first,
            first + IDS_PER_CALL,
        )  # the first id that is refused lies in (known, refused], or is `first`
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


def _first_difference(student: Sequence[int], teacher: Sequence[int]) -> str:
    index = next(
        (i for i, (a, b) in enumerate(zip(student, teacher, strict=False)) if a != b), min(len(student), len(teacher))
    )
    return f"{len(student)} and {len(teacher)} tokens, the first difference at index {index}"
