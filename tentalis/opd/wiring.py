"""Builds the hinters and the teacher of a process from its settings."""

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from tentalis.inference.client import OpenAIClient
from tentalis.inference.protocol import InferenceError, ServerUnavailable
from tentalis.inference.replicas.client import ReplicatedClient, inference_client, routers_of
from tentalis.opd.config import (
    GivenHinterSettings,
    Hinters,
    JudgeHinterSettings,
    LessonSettings,
    NoHinterSettings,
    TeacherSettings,
)
from tentalis.opd.hinters import GivenHinter, Hinter, JudgeHinter, NoHinter, RuleHinter, VoteSettings
from tentalis.opd.lesson import LessonJudge
from tentalis.opd.models import FixedModel, SamplerModel
from tentalis.opd.teacher import Teacher
from tentalis.opd.tokenizer import check_same_tokens
from tentalis.rewards.chat import ChatClient, ChatEndpoint

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 10.0
"""Seconds that a server may take to answer when the teacher is checked at the start."""


def make_hinters(settings: Hinters, env: Mapping[str, str] = os.environ) -> dict[str, Hinter]:
    """The hinters by environment, `*` for all others. Raises NoApiKey."""

    def hinter_of(hinter_settings: object) -> Hinter:
        if isinstance(hinter_settings, JudgeHinterSettings):
            model_identity = [hinter_settings.endpoint.model, sorted(hinter_settings.endpoint.extra.items())]
            vote_settings = VoteSettings(
                hinter_settings.votes, hinter_settings.select, hinter_settings.temperature, hinter_settings.max_tokens
            )
            return JudgeHinter(
                ChatClient(hinter_settings.endpoint, env), model_identity, vote_settings, hinter_settings.name
            )
        if isinstance(hinter_settings, GivenHinterSettings):
            return GivenHinter()
        return NoHinter() if isinstance(hinter_settings, NoHinterSettings) else RuleHinter()

    return {environment: hinter_of(hinter_settings) for environment, hinter_settings in settings.hinters.items()}


def make_lesson_judge(settings: LessonSettings, env: Mapping[str, str] = os.environ) -> LessonJudge:
    """The judge that extracts lessons. Raises NoApiKey."""
    endpoint = settings.endpoint
    model_identity = [endpoint.model, sorted(endpoint.extra.items()), settings.most_tokens]
    return LessonJudge(
        ChatClient(endpoint, env), model_identity, settings.temperature, settings.max_tokens, settings.name
    )


def token_cutter(server: str, max_tokens: int) -> Callable[[str], Awaitable[str]]:
    """Returns a function that cuts a text after its last whole line within `max_tokens` tokens of the student's
    tokenizer."""
    student = inference_client(server)
    model = FixedModel(partial(find_base_model, student))

    async def cut(text: str) -> str:
        name = await model.find()
        ids = await student.tokenize(name, text, add_special_tokens=False)
        if len(ids) <= max_tokens:
            return text
        kept_text = await student.detokenize(name, ids[:max_tokens].tolist())
        return kept_text.rpartition("\n")[0] or kept_text

    return cut


def make_teacher(settings: TeacherSettings, server: str, env: Mapping[str, str] = os.environ) -> Teacher:
    """The teacher. One with its own url is checked against the student's tokenizer before its first call.

    Args:
        server: URL of the student's server, or of each of its replicas, separated by commas.
    Raises NoApiKey.
    """
    student = inference_client(server)
    if settings.url is not None:
        assert settings.model is not None, "TeacherSettings checks this"
        teacher_client, name = _client(settings, env), settings.model

        async def checked_name() -> str:
            await check_same_tokens(student, await find_base_model(student), teacher_client, name)
            return name

        return Teacher(teacher_client, FixedModel(checked_name), settings.top)

    async def served_names() -> list[str]:
        return [str(card["id"]) for card in await student.models()]

    async def model_name() -> str:
        return settings.model or await find_base_model(student)

    model = SamplerModel(served_names) if settings.same_weights else FixedModel(model_name)
    return Teacher(student, model, settings.top, routers_of(student))


async def check_teacher(settings: TeacherSettings, server: str, env: Mapping[str, str] = os.environ) -> None:
    """Checks that a teacher with its own url has the student's tokenizer. If a server does not answer now, the check
    runs before the first hint instead. Raises OtherTokenizer or NoApiKey."""
    if settings.url is None or settings.model is None:
        return
    async with (
        inference_client(server, partial(OpenAIClient, timeout=CHECK_TIMEOUT_S)) as student,
        _client(settings, env, CHECK_TIMEOUT_S) as teacher,
    ):
        try:
            await check_same_tokens(student, await find_base_model(student), teacher, settings.model)
        except InferenceError as error:
            log.warning("cannot compare the teacher's tokenizer now; trying again at the first hint: %s", error)


async def find_base_model(client: OpenAIClient | ReplicatedClient) -> str:
    """The name of a server's base model. Raises InferenceError."""
    bases = [str(card["id"]) for card in await client.models() if not card.get("parent")]
    if not bases:
        raise ServerUnavailable(f"{client.base_url} lists no base model")
    return bases[0]


def _client(settings: TeacherSettings, env: Mapping[str, str], timeout: float = 300.0) -> OpenAIClient:
    assert settings.url is not None and settings.model is not None
    key = ChatEndpoint(url=settings.url, model=settings.model, api_key_env=settings.api_key_env).api_key(env)
    return OpenAIClient(settings.url, None if key is None else key.get_secret_value(), timeout)
