"""The hinters and the teacher of a process, from its settings."""

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import InferenceError, ServerUnavailable
from tentalis.opd.config import Hinters, Judge, LessonSettings, Off, TeacherSettings
from tentalis.opd.hinters import Asking, Hinter, JudgeHinter, NoHinter, RuleHinter
from tentalis.opd.lesson import LessonJudge
from tentalis.opd.models import OneModel, SamplersModel
from tentalis.opd.teacher import Teacher
from tentalis.opd.tokenizer import check_same_tokens
from tentalis.rewards.chat import Chat, Endpoint

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""How long a server may take to answer when the teacher is looked at before the start."""


def make_hinters(settings: Hinters, env: Mapping[str, str] = os.environ) -> dict[str, Hinter]:
    """By environment, `*` for the rest. Raises NoApiKey."""

    def made(each: object) -> Hinter:
        if isinstance(each, Judge):
            asked = [each.endpoint.model, sorted(each.endpoint.extra.items())]
            asking = Asking(each.votes, each.select, each.temperature, each.max_tokens)
            return JudgeHinter(Chat(each.endpoint, env), asked, asking, each.name)
        return NoHinter() if isinstance(each, Off) else RuleHinter()

    return {environment: made(each) for environment, each in settings.hinters.items()}


def make_lesson_judge(settings: LessonSettings, env: Mapping[str, str] = os.environ) -> LessonJudge:
    """Who extracts lessons. Raises NoApiKey."""
    endpoint = settings.endpoint
    asked = [endpoint.model, sorted(endpoint.extra.items()), settings.most_tokens]
    return LessonJudge(Chat(endpoint, env), asked, settings.temperature, settings.max_tokens, settings.name)


def token_cut(server: str, most: int) -> Callable[[str], Awaitable[str]]:
    """Cuts a text after its last whole line within `most` tokens of the student's."""
    student = OpenAIClient(server)
    model = OneModel(partial(base_model, student))

    async def cut(text: str) -> str:
        name = await model.find()
        ids = await student.tokenize(name, text, add_special_tokens=False)
        if len(ids) <= most:
            return text
        kept = await student.detokenize(name, ids[:most].tolist())
        return kept.rpartition("\n")[0] or kept

    return cut


def make_teacher(settings: TeacherSettings, server: str, env: Mapping[str, str] = os.environ) -> Teacher:
    """The teacher; one at a url of its own is held against the student's tokenizer before it is asked anything.

    Args:
        server: URL of the student's server.
    Raises NoApiKey.
    """
    student = OpenAIClient(server)
    if settings.url is not None:
        assert settings.model is not None, "the settings see to it"
        elsewhere, name = _client(settings, env), settings.model

        async def checked() -> str:
            await check_same_tokens(student, await base_model(student), elsewhere, name)
            return name

        return Teacher(elsewhere, OneModel(checked), settings.top)

    async def served() -> list[str]:
        return [str(card["id"]) for card in await student.models()]

    async def here() -> str:
        return settings.model or await base_model(student)

    model = SamplersModel(served) if settings.same_weights else OneModel(here)
    return Teacher(student, model, settings.top)


async def look_at_teacher(settings: TeacherSettings, server: str, env: Mapping[str, str] = os.environ) -> None:
    """Whether a teacher elsewhere has the student's tokenizer, as far as both answer now; if not, it is looked at again
    before the first hint. Raises OtherTokenizer or NoApiKey."""
    if settings.url is None or settings.model is None:
        return
    async with OpenAIClient(server, timeout=LOOK_S) as student, _client(settings, env, LOOK_S) as elsewhere:
        try:
            await check_same_tokens(student, await base_model(student), elsewhere, settings.model)
        except InferenceError as error:
            log.warning("the teacher's tokenizer is compared with the first hint, since it cannot be now: %s", error)


async def base_model(client: OpenAIClient) -> str:
    """The name of a server's base model. Raises InferenceError."""
    bases = [str(card["id"]) for card in await client.models() if not card.get("parent")]
    if not bases:
        raise ServerUnavailable(f"{client.base_url} lists no base model")
    return bases[0]


def _client(settings: TeacherSettings, env: Mapping[str, str], timeout: float = 300.0) -> OpenAIClient:
    assert settings.url is not None and settings.model is not None
    key = Endpoint(url=settings.url, model=settings.model, api_key_env=settings.api_key_env).api_key(env)
    return OpenAIClient(settings.url, None if key is None else key.get_secret_value(), timeout)
