"""The file that says who makes hints and who teaches."""

import asyncio
from pathlib import Path

import pytest

from schemas.records import sample_of
from tentalis.opd.config import BadHinters, Hinters, JudgeHinterSettings, TeacherSettings, load_hinters
from tentalis.opd.tokenizer import OtherTokenizer
from tentalis.opd.wiring import check_teacher, make_hinters, make_teacher, token_cutter
from tentalis.rewards.chat import NoApiKey
from tests.support.model_server import BASE, model_server
from tests.support.stream_records import make_result

FILE = """
hinters:
  chat:
    kind: judge
    endpoint: {url: "http://127.0.0.1:9/v1", model: qwen, api_key_env: HINT_KEY, time_limit_s: 30}
    votes: 3
    select: all
  "*": {kind: rule}
teacher: {url: "https://gpu.example.org/v1", model: large, api_key_env: TEACHER_KEY, top: 8}
"""
KEYS = {"HINT_KEY": "one", "TEACHER_KEY": "two"}


def loaded(folder: Path, text: str) -> Hinters:
    (folder / "hinters.yaml").write_text(text, encoding="utf-8")
    return load_hinters(folder / "hinters.yaml")


def test_a_file_makes_hinters_and_a_teacher(tmp_path: Path) -> None:
    settings = loaded(tmp_path, FILE)
    assert isinstance(settings.hinters["chat"], JudgeHinterSettings) and settings.teacher.top == 8
    made = make_hinters(settings, KEYS)
    assert made["chat"].name.startswith("judge/3-") and made["*"].name == "rule/7"
    assert make_teacher(settings.teacher, "http://127.0.0.1:9", KEYS).top == 8


def test_a_file_without_anything_is_the_rule_and_the_base_model(tmp_path: Path) -> None:
    assert loaded(tmp_path, "{}") == Hinters()
    assert make_hinters(Hinters())["*"].name == "rule/7"


@pytest.mark.parametrize("variable", ["HINT_KEY", "TEACHER_KEY"])
def test_a_key_that_is_not_set_is_named(variable: str, tmp_path: Path) -> None:
    settings = loaded(tmp_path, FILE)
    with pytest.raises(NoApiKey, match=variable):
        env = {name: key for name, key in KEYS.items() if name != variable}
        make_hinters(settings, env)
        make_teacher(settings.teacher, "http://127.0.0.1:9", env)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hinters: [", "not YAML"),
        ("- rule", "a mapping"),
        ("hinters: {chat: {kind: rule}}", "an entry for all other environments"),
        ('hinters: {"*": {kind: magic}}', "magic"),
        ('hinters: {"*": {kind: judge}}', "hinters.*.endpoint: Field required"),
        ('hinters: {"*": {kind: rule, votes: 3}}', "votes"),
        (
            FILE.replace("time_limit_s: 30", "time_limit_s: 101"),
            "hinters.chat.endpoint.time_limit_s: Input should be less than or equal to 100",
        ),
        (FILE.replace("votes: 3", "votes: 0"), "hinters.chat.votes"),
        (FILE.replace("select: all", "select: best"), "hinters.chat.select"),
        (FILE.replace(", top: 8", ""), "needs teacher.top above 0"),
        (FILE.replace("top: 8", "top: 21"), "teacher.top"),
        (FILE.replace("model: large, ", ""), "a teacher with a url needs model"),
        ("teacher: {same_weights: true, model: x}", "remove model and url"),
        ("teacher: {api_key_env: KEY}", "api_key_env needs url"),
        ('teacher: {url: "ftp://x", model: m}', "http"),
        ('teacher: {url: "http://u:secret@x", model: m}', "password"),
        ("theacher: {}", "theacher"),
        (FILE + "teacher: {}\n", "teacher: duplicate key"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadHinters) as refused:
        loaded(tmp_path, text)
    assert str(refused.value).startswith(f"{tmp_path}/hinters.yaml: ") and why in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadHinters, match=r"none\.yaml: No such file"):
        load_hinters(tmp_path / "none.yaml")


def test_a_teacher_elsewhere_is_held_against_the_students_tokenizer_at_the_start_and_before_it_teaches() -> None:
    result = make_result()
    with model_server() as student, model_server() as same, model_server(shift=1) as other:

        def teaches(url: str) -> str:
            teacher = make_teacher(TeacherSettings(url=url, model=BASE), student)
            return asyncio.run(teacher.logprobs(sample_of(result), result.task, ["Be brief, please."])).teacher

        assert teaches(same) == BASE
        asyncio.run(check_teacher(TeacherSettings(url=same, model=BASE), student))
        why = f"{BASE} at {other} cannot teach {BASE} at {student}: a probe text has different tokens"
        with pytest.raises(OtherTokenizer, match=why):
            teaches(other)
        with pytest.raises(OtherTokenizer, match=why):
            asyncio.run(check_teacher(TeacherSettings(url=other, model=BASE), student))


@pytest.mark.parametrize(
    ("lesson", "kept"),
    [("Do: a\nDo: b", "Do: a\nDo: b"), ("Do: a\nDon't: b", "Do: a"), ("Do: one long line", "Do: one lon")],
)
def test_a_lesson_is_cut_after_the_last_whole_line_that_the_students_tokens_allow(lesson: str, kept: str) -> None:
    with model_server() as student:
        assert asyncio.run(token_cutter(student, 11)(lesson)) == kept
