"""How many tokens a prompt has: Anthropic's count_tokens, by the tokenizer of the backend that would answer."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tentalis.gateway.anthropic_shape import MessagesShape
from tentalis.gateway.backends import Backends
from tentalis.gateway.bodies import body_of
from tentalis.gateway.calls import Calls
from tentalis.gateway.exchange import message_of, read
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Keys, Scope, presented
from tentalis.gateway.sessions_of import USER_ID, WORKER_ID
from tentalis.gateway.settings import GatewaySettings

# vLLM's, and that of `tentalis serve model`.
_PATH = "/tokenize"
_TEMPLATED = ("model", "messages", "tools", "chat_template_kwargs")


class Counting:
    """POST /v1/messages/count_tokens. Nothing of it is recorded."""

    def __init__(self, settings: GatewaySettings, keys: Keys, calls: Calls, backends: Backends) -> None:
        self._settings, self._keys, self._calls, self._backends = settings, keys, calls, backends
        self._shape = MessagesShape()

    async def answer(self, request: Request) -> Response:
        """The answer, an error included: 501 where the backend has no tokenizer to ask."""
        try:
            return JSONResponse({"input_tokens": await self._count(request)})
        except Refused as error:
            body = self._shape.error(error.status, error.kind, str(error))
            return JSONResponse(body, status_code=error.status, headers=error.headers)

    async def _count(self, request: Request) -> int:
        caller = self._keys.caller(presented(request.headers.raw), Scope.CHAT)
        given = await body_of(request, self._settings.body_bytes, self._settings.body_s)
        body = self._shape.prompt(given)
        user_id = caller.user_id(request.headers.get(USER_ID))
        to = await self._calls.route(body.get("model"), user_id, request.headers.get(WORKER_ID, ""))
        asked: dict[str, Any] = {name: body[name] for name in _TEMPLATED if name in body}
        if to.model is not None:
            asked["model"] = to.model
        backend = self._backends[to.backend.name]
        response = await backend.post(_PATH, asked, {})
        try:
            said = backend.redacted(await read(response))
        finally:
            await response.aclose()
        status, name = response.status_code, to.backend.name
        if status in (404, 405, 501):
            why = f"its {_PATH} answered {status}: {message_of(said)}"
            raise Refused(501, f"the backend {name} does not count tokens ({why})", "api_error")
        if status != 200:
            raise Refused(status if status >= 400 else 502, f"the backend {name} answered {status}: {message_of(said)}")
        try:
            return int(json.loads(said)["count"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Refused(502, f"the backend {name} answered {_PATH} with no count", "server_error") from error
