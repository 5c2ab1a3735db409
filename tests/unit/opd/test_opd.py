"""Hints, the teacher's prompt, and the alignment of the teacher's log-probs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from schemas.records import Sample, Sampling, sample_of
from schemas.tensors import float32_view, int32_bytes, int32_view, uint8_bytes
from tentalis.inference.chat_messages import normalised, unspoken
from tentalis.inference.protocol import Int32, Message, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.opd import (
    HINT_TAG,
    FixedModel,
    NoPrompt,
    NoUserMessage,
    Teacher,
    TeacherPrompt,
    TeacherRefused,
    TeacherScores,
    align_scores,
    rule_hint,
    student_prompt,
    with_hint,
)
from tests.support.fake_inference import FakeInference
from tests.support.stream_records import make_result, make_task

HINT = "Please be brief and plain."


# --- hints ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "   ", "\n\t", "too long!!", " short... "])
def test_ten_characters_or_less_are_no_hint(text: str) -> None:
    assert rule_hint(text) is None


def test_a_hint_is_the_text_in_one_line_of_three_sentences_at_most() -> None:
    assert rule_hint("too long!!!") == "too long!!!"
    assert rule_hint("  One here.\n\nTwo\tthere. Three! Four?  ") == "One here. Two there. Three!"
    assert rule_hint("zero\x00width\u200b but long") == "zero width but long"


def test_the_hint_is_the_request_without_the_reproach() -> None:
    assert rule_hint("That was too long: please answer in one sentence.") == "Please answer in one sentence."
    assert rule_hint("Too long. Please be brief. PLEASE no lists!") == "Please be brief. Please no lists!"
    assert rule_hint("I am pleased with short answers.") == "I am pleased with short answers."


def test_a_pasted_log_does_not_get_into_the_prompt() -> None:
    hint = rule_hint("word " * 1000)
    assert hint is not None and len(hint) <= 400 and hint.endswith("word")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("不对！", None),
        ("もっと短く", None),
        ("请简短一些。", "请简短一些。"),
        ("請用繁體中文回答", "請用繁體中文回答"),
        ("もっと短く書いて。", "もっと短く書いて。"),
        ("더 짧게 써 주세요.", "더 짧게 써 주세요."),
        (
            "太长了。请用一句话回答。不要列表！也不要表格。上次你说得更好。",
            "太长了。请用一句话回答。不要列表！",
        ),
        (
            "長すぎます。 一文で答えてください。箇条書きは使わないで！表もいりません。",
            "長すぎます。一文で答えてください。箇条書きは使わないで！",
        ),
        ("我说的是“太长了。”不是错了。请改短。谢谢。再见。", "我说的是“太长了。”不是错了。请改短。谢谢。"),
        ("太长了！！请用一句话回答。不要列表。也不要表格。", "太长了！！请用一句话回答。不要列表。"),
    ],
)
def test_chinese_japanese_and_korean_are_measured_in_their_own_way(text: str, hint: str | None) -> None:
    assert rule_hint(text) == hint


def test_a_long_sentence_without_spaces_is_cut_at_a_pause() -> None:
    clause = "请把每一步的理由写清楚并且不要省略任何中间结果，"
    hint = rule_hint(clause * 40)
    assert hint is not None and hint == clause * (len(hint) // len(clause)) and 100 < len(hint) <= 200
    hint = rule_hint("好，" + "短" * 1000)
    assert hint is not None and 190 < len(hint) <= 200


# --- prompt -----------------------------------------------------------------------------------------------------------


def test_the_hint_goes_to_the_end_of_the_last_user_message() -> None:
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
        {"role": "tool", "content": "2"},
    ]
    prompt = with_hint(TeacherPrompt(messages, {"tools": [1]}), HINT)
    assert prompt.messages[2] == {"role": "user", "content": f"Two?\n\n{HINT_TAG}\n{HINT}"}
    assert HINT_TAG == "[user's hint / instruction]" and prompt.template == {"tools": [1]}
    assert [m for i, m in enumerate(prompt.messages) if i != 2] == [m for i, m in enumerate(messages) if i != 2]
    assert messages[2]["content"] == "Two?"


def test_a_prompt_without_a_user_takes_no_hint() -> None:
    with pytest.raises(NoUserMessage):
        with_hint(TeacherPrompt([{"role": "system", "content": "Speak."}], {}), HINT)


TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def test_what_the_student_was_asked_is_made_again_of_what_the_gateway_wrote_down() -> None:
    sent: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "And in"}, {"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "Sunny.", "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "text", "text": "Thanks."}]},
    ]
    body = {"tools": TOOLS, "chat_template_kwargs": {"thinking": False}, "temperature": 1.0, "tool_choice": "auto"}
    task = make_task(messages=normalised(sent), metadata={"session_event_id": "e", "request": unspoken(body, sent)})
    prompt = student_prompt(task)
    assert prompt.messages == [*sent[:4], {"role": "user", "content": "Thanks."}]
    assert prompt.template == {"tools": TOOLS, "chat_template_kwargs": {"thinking": False}}
    last = with_hint(TeacherPrompt(prompt.messages[:4], {}), HINT).messages[1]["content"]
    assert last == [*sent[1]["content"], {"type": "text", "text": f"\n\n{HINT_TAG}\n{HINT}"}]


@pytest.mark.parametrize("request_", ["{", "[]", '{"messages": [1]}', '{"messages": {"0": 1}}', "[" * 100_000])
def test_a_request_that_cannot_be_read_has_no_teacher(request_: str) -> None:
    with pytest.raises(NoPrompt, match="cannot be read"):
        student_prompt(make_task(metadata={"session_event_id": "e", "request": request_}))
    with pytest.raises(TeacherRefused) as refused:
        ask(FakeInference(), task=make_task(metadata={"session_event_id": "e", "request": request_}))
    assert refused.value.reason == "no_prompt"


def test_task_metadata_named_request_that_the_gateway_did_not_write_is_ignored() -> None:
    assert student_prompt(make_task(metadata={"request": "Fix the bug."})).template == {}


def test_an_image_is_not_in_the_tokens_that_the_teacher_scores() -> None:
    sent = [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {}}]}]
    with pytest.raises(NoPrompt, match="image_url"):
        student_prompt(
            make_task(messages=normalised(sent), metadata={"session_event_id": "e", "request": unspoken({}, sent)})
        )


# --- teacher ----------------------------------------------------------------------------------------------------------


def test_the_students_prompt_is_made_again_with_its_tools_before_the_teacher_is_asked() -> None:
    inference = FakeInference()
    task = make_task(metadata={"session_event_id": "e", "request": unspoken({"tools": TOOLS}, [])})
    ask(inference, task=task)
    assert inference.plain == [([message.model_dump() for message in task.messages], {"tools": TOOLS})]
    assert inference.templates == [{"tools": TOOLS}]


@pytest.mark.parametrize("prompt", [(1, 2), (1, 2, 3, 4), (1, 2, 4)])
def test_another_prompt_than_the_students_is_no_teacher(prompt: tuple[int, ...]) -> None:
    inference = FakeInference(prompt=prompt)
    with pytest.raises(TeacherRefused, match="other tokens") as refused:
        ask(inference)
    assert refused.value.reason == "other_prompt" and not inference.scored and not inference.rendered


class Calendar(FakeInference):
    """A server whose chat template writes today's date, or that of `date_string`."""

    async def render(
        self,
        model: str,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
    ) -> Int32:
        settings = (template or {}).get("chat_template_kwargs") or {}
        self.prompt = (1, 2, int(settings.get("date_string", "09 Mar 2026")[:2]))
        return await super().render(model, messages, add_generation_prompt, template)


NOON = 1_772_366_400_000  # of 1 March 2026


def test_a_template_that_writes_the_date_is_given_that_of_the_turn() -> None:
    inference = Calendar()
    taught = ask(inference, task=make_task(event_time=NOON), prompt=(1, 2, 1))
    assert taught.hints == (HINT,)
    assert inference.templates == [{"chat_template_kwargs": {"date_string": "01 Mar 2026"}}]
    today = Calendar()
    ask(today, task=make_task(event_time=NOON), prompt=(1, 2, 9))
    assert today.templates == [{}], "what makes the student's prompt as it is, stays as it is"


@pytest.mark.parametrize("at", [NOON, -1, 2**62])
def test_a_date_that_the_client_chose_or_a_time_that_is_none_is_not_put_in(at: int) -> None:
    chosen = unspoken({"chat_template_kwargs": {"date_string": "05 Mar 2026"}}, [{"role": "user", "content": "Hi"}])
    metadata = {"session_event_id": "e", "request": chosen} if at == NOON else {}
    inference = Calendar()
    with pytest.raises(TeacherRefused, match="other tokens"):
        ask(inference, task=make_task(event_time=at, metadata=metadata), prompt=(1, 2, 1))
    assert len(inference.plain) == 1


def ask(inference: FakeInference, sample: Sample | None = None, top: int = 0, **fields: Any) -> TeacherScores:
    result = make_result(**fields)

    async def model() -> str:
        inference.asked_for_model += 1
        return "base"

    teacher = Teacher(inference, FixedModel(model), top)
    return asyncio.run(teacher.logprobs(sample or sample_of(result), result.task, [HINT]))


def test_the_teacher_scores_the_students_tokens_behind_the_hinted_prompt() -> None:
    inference = FakeInference()
    taught = ask(inference, response=(10, 11, 12, 13))
    assert (taught.teacher, taught.topk) == ("base", 0)
    (model, tokens, temperature) = inference.scored[0]
    assert (model, temperature) == ("base", 1.0)
    prefix = inference.tokens_of(inference.rendered[0])
    assert tokens == [*prefix, 10, 11, 12, 13]
    assert HINT in inference.rendered[0][-1]["content"]
    scores = [inference.logprob(len(prefix) + i, token) for i, token in enumerate((10, 11, 12, 13))]
    np.testing.assert_array_equal(float32_view(taught.logprobs), np.float32([0, 0, 0, *scores]))


def test_the_teacher_lists_the_likeliest_tokens_where_it_is_asked_for_them() -> None:
    inference = FakeInference()
    taught = ask(inference, response=(10, 11), top=2)
    n_prefix = len(inference.tokens_of(inference.rendered[0]))
    none = [-1, -1]
    assert taught.topk == 2
    assert int32_view(taught.topk_ids).reshape(-1, 2).tolist() == [
        *[none] * 3,
        [n_prefix, n_prefix + 1],
        [n_prefix + 1, n_prefix + 2],
    ]
    assert float32_view(taught.topk_logprobs).reshape(-1, 2).tolist() == [*[[0, 0]] * 3, [-1, -2], [-1, -2]]


def test_the_teacher_scores_at_the_students_temperature() -> None:
    inference = FakeInference()
    ask(inference, sampling=Sampling(temperature=0.6))
    assert inference.scored[0][2] == 0.6


def masked(mask: Sequence[int]) -> Sample:
    n = len(mask)
    sample = sample_of(make_result(prompt=(1,), response=tuple(range(2, n + 1))))
    return sample.model_copy(update={"loss_mask": uint8_bytes(mask), "token_ids": int32_bytes(range(1, n + 1))})


def test_log_probs_stand_where_the_mask_is_and_nowhere_else() -> None:
    sample = masked([0, 0, 1, 1, 0, 0, 1])
    scores = np.float32([np.nan, -9, -9, -1, -2, -3, -4, -5])
    placed = float32_view(align_scores(sample, np.int32([7, 7, 7]), scores))
    np.testing.assert_array_equal(placed, np.float32([0, 0, -1, -2, 0, 0, -5]))


def test_scores_outside_the_mask_need_not_be_finite() -> None:
    sample = masked([0, 1, 0, 1])
    scores = np.float32([np.nan, -1, np.nan, -2])
    np.testing.assert_array_equal(float32_view(align_scores(sample, np.int32([5]), scores)), np.float32([0, -1, 0, -2]))


@pytest.mark.parametrize(
    "scores", [[np.nan, -1], [np.nan, -1, -2, -3], [], [np.nan, -1, np.nan], [np.nan, -np.inf, -1]]
)
def test_anything_but_one_finite_score_per_token_is_no_teaching(scores: list[float]) -> None:
    with pytest.raises(TeacherRefused, match="scores"):
        align_scores(masked([0, 1, 1]), np.int32([5]), np.float32(scores))


def test_a_sample_without_a_response_cannot_be_taught() -> None:
    with pytest.raises(TeacherRefused, match="no response"):
        align_scores(masked([0, 0]), np.int32([5]), np.float32([np.nan]))


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_of_the_call_is_told_from_a_server_in_trouble(status: int) -> None:
    with pytest.raises(TeacherRefused, match="too long"):
        ask(FakeInference(fails=lambda call: RequestRefused(status, "too long")))


@pytest.mark.parametrize("error", [ServerUnavailable("away"), RequestRefused(500, "oops"), RequestRefused(429, "busy")])
def test_a_server_in_trouble_is_not_the_records_fault(error: Exception) -> None:
    with pytest.raises(type(error)):
        ask(FakeInference(fails=lambda call: error))


def test_the_teachers_name_is_asked_for_once_and_again_when_it_is_not_known() -> None:
    inference = FakeInference()
    names = ["old", "new"]

    async def model() -> str:
        return names.pop(0)

    async def story() -> list[str]:
        teacher = Teacher(inference, FixedModel(model))
        sample, task = sample_of(make_result()), make_result().task
        first = (await teacher.logprobs(sample, task, [HINT])).teacher
        again = (await teacher.logprobs(sample, task, [HINT])).teacher
        inference.fails = lambda call: UnknownModel(404, "not served") if call == "old" else None
        with pytest.raises(UnknownModel):
            await teacher.logprobs(sample, task, [HINT])
        return [first, again, (await teacher.logprobs(sample, task, [HINT])).teacher]

    assert asyncio.run(story()) == ["old", "old", "new"]
