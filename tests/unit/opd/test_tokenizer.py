"""A teacher elsewhere must have the student's tokenizer, and which model the teacher is."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from schemas.records import sample_of
from streams.runtime.delivery import BatchRunner
from tentalis.inference.protocol import Int32, Message, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.opd import FixedModel, SamplerModel, Teacher, TeacherRefused
from tentalis.opd.tokenizer import IDS_PER_CALL, OtherTokenizer, check_same_tokens
from tests.support.fake_inference import FakeInference
from tests.support.stream_records import make_result

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]


class Tokens:
    """A tokenizer of single characters with special tokens, behind a server's three endpoints."""

    def __init__(
        self,
        special: Sequence[str] = SPECIAL,
        *,
        characters: str = "".join(map(chr, range(3000))),
        begins: bool = False,
        template: str = "<|im_start|>{role}\n{content}<|im_end|>\n",
        padded: int | None = None,
    ) -> None:
        self.base_url = f"http://{id(self)}"
        self.texts = [*characters, *special]
        self.special, self.begins, self.template = list(special), begins, template
        self.padded = padded
        self.fails: Callable[[str], Exception | None] = lambda endpoint: None

    def ids(self, text: str) -> list[int]:
        found, rest = [], text
        while rest:
            whole = next((token for token in self.special if rest.startswith(token)), rest[0])
            found.append(self.texts.index(whole) if whole in self.texts else 0)
            rest = rest[len(whole) :]
        return found

    def _check(self, endpoint: str) -> None:
        error = self.fails(endpoint)
        if error is not None:
            raise error

    async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Int32:
        self._check("tokenize")
        begin = [len(self.texts) - len(self.special)] if add_special_tokens and self.begins else []
        return np.asarray([*begin, *self.ids(text)], dtype=np.int32)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._check("detokenize")
        if self.padded is not None and max(token_ids) >= self.padded:
            raise RequestRefused(400, "outside the vocabulary")
        return "".join(self.texts[i] if i < len(self.texts) else "" for i in token_ids)

    async def render(self, model: str, messages: Sequence[Message], add_generation_prompt: bool = True) -> Int32:
        self._check("render")
        text = "".join(self.template.format(**message) for message in messages)
        return np.asarray(self.ids(text + self.template.partition("{content}")[0].format(role="assistant")), np.int32)


def check(student: Tokens, teacher: Tokens) -> None:
    asyncio.run(check_same_tokens(student, "small", teacher, "large"))


@pytest.mark.parametrize("ours", [None, 3003, 3010, 3 * IDS_PER_CALL, 3 * IDS_PER_CALL + 500, 10 * IDS_PER_CALL])
@pytest.mark.parametrize("theirs", [None, 3003, 4000])
def test_the_same_tokenizer_is_taken_however_the_embeddings_are_padded(ours: int | None, theirs: int | None) -> None:
    check(Tokens(padded=ours), Tokens(padded=theirs))


SWAPPED = "".join(map(chr, [*range(2000), 2001, 2000, *range(2002, 3000)]))


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        (Tokens(characters="".join(map(chr, range(2999)))), "another prompt"),
        (Tokens(characters="".join(map(chr, range(3000))).swapcase()), "without special tokens"),
        (Tokens(characters=SWAPPED), "ids 1024 to 2047"),
        (Tokens(begins=True), "with the special tokens that the tokenizer adds"),
        (Tokens([*SPECIAL, "<think>"]), "ids 2048 to 3071"),
        (Tokens(template="### {role}\n{content}\n"), "another prompt"),
        (Tokens(["<s>", "<|im_end|>", "<|im_start|>"]), "another prompt"),
        (Tokens(padded=2900), "ids 2048 to 3071"),
    ],
)
def test_another_tokenizer_is_refused_with_what_differs(teacher: Tokens, why: str) -> None:
    student = Tokens()
    with pytest.raises(OtherTokenizer, match=why) as refused:
        check(student, teacher)
    assert f"large at {teacher.base_url} cannot teach small at {student.base_url}" in str(refused.value)


def test_special_tokens_that_are_read_as_plain_text_are_refused() -> None:
    class Deaf(Tokens):
        """Renders with its special tokens, but takes them for text where they are written out."""

        async def tokenize(self, model: str, text: str, add_special_tokens: bool = True) -> Int32:
            return np.asarray([self.texts.index(char) if char in self.texts else 0 for char in text], np.int32)

    with pytest.raises(OtherTokenizer, match="special tokens of the chat template"):
        check(Tokens(), Deaf())


def test_a_teacher_without_a_chat_template_is_refused_and_one_that_is_away_is_not() -> None:
    for error, raised in (
        (RequestRefused(400, "no chat template"), OtherTokenizer),
        (ServerUnavailable("away"), ServerUnavailable),
        (RequestRefused(500, "oops"), RequestRefused),
    ):
        teacher = Tokens()
        teacher.fails = lambda endpoint, error=error: error if endpoint == "render" else None  # type: ignore[misc]
        with pytest.raises(raised):
            check(Tokens(), teacher)


# --- which model ------------------------------------------------------------------------------------------------------


def asked(inference: FakeInference, served: list[str]) -> Any:
    async def names() -> list[str]:
        return served

    result = make_result()
    teacher = Teacher(inference, SamplerModel(names))
    return asyncio.run(teacher.logprobs(sample_of(result), result.task, ["Be brief, please."]))


def test_the_same_weights_are_those_that_sampled_the_answer() -> None:
    assert asked(FakeInference(), []).teacher == "assistant@v1"


def test_weights_that_gave_way_to_newer_ones_teach_no_more_and_a_server_that_starts_is_waited_for() -> None:
    gone = FakeInference(lambda model: UnknownModel(404, "not served"))
    with pytest.raises(TeacherRefused, match="the server has v4 now"):
        asked(gone, ["base", "assistant@v2", "assistant@v4", "other@v9"])
    for served in (["base"], ["base", "assistant@v0", "other@v9"]):
        with pytest.raises(UnknownModel):
            asked(gone, served)


def test_a_wrong_teacher_ends_the_process_instead_of_making_dead_letters() -> None:
    from schemas import topics
    from streams.apps.hinting.processor import Hinting
    from streams.runtime.state import StateStore
    from tentalis.dlq.limits import DeadLetterLimits
    from tests.support.stream_records import CODEC, make_feedback, on_log

    class Nowhere:
        async def send(self, records: Any) -> int:
            raise AssertionError(f"nothing is to be written, least of all {records}")

    looked: list[str] = []

    async def wrong() -> str:
        looked.append("")
        await check_same_tokens(Tokens(), "small", Tokens(begins=True), "large")
        return "large"

    app = Hinting(CODEC, Teacher(FakeInference(), FixedModel(wrong)))
    runner = BatchRunner(
        app, Nowhere(), store=StateStore(), changelog=None, limits=DeadLetterLimits(), record_limit=100_000, version="1"
    )
    records = [on_log(topics.FEEDBACK, make_feedback(text="Please be brief, for once."), offset) for offset in (0, 1)]
    with pytest.raises(OtherTokenizer):
        asyncio.run(runner.run(3, records))
    assert len(looked) == 1, "and is looked at once, however many hints wait for it"
