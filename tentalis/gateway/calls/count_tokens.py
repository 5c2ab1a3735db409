"""Anthropic's count_tokens: counts a prompt's tokens with the tokenizer of the backend that would answer."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tentalis.gateway.backends.backend import BackendClients
from tentalis.gateway.calls.backend_call import error_message, read_body
from tentalis.gateway.calls.backend_request import check_template_settings
from tentalis.gateway.calls.call import CallBuilder
from tentalis.gateway.calls.session_id import USER_ID, WORKER_ID
from tentalis.gateway.http.bodies import body_of
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Keys, Scope, presented
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.protocols.anthropic import MessagesProtocol
from tentalis.gateway.protocols.messages import checked
from tentalis.gateway.settings import GatewaySettings
from tentalis.inference.replicas.router import CallOutcome

# The tokenizer's path in vLLM and in `tentalis serve model`.
_PATH = "/tokenize"
_TEMPLATE_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")


class TokenCounter:
    """POST /v1/messages/count_tokens. Nothing is recorded."""

    def __init__(
        self, settings: GatewaySettings, keys: Keys, calls: CallBuilder, backends: BackendClients, usage: KeyUsage
    ) -> None:
        self._usage = usage
        self._settings, self._keys, self._calls, self._backends = settings, keys, calls, backends
        self._protocol = MessagesProtocol()

    async def answer(self, request: Request) -> Response:
        """Returns the count or an error: 501 if the backend has no tokenizer endpoint."""
        try:
            return JSONResponse({"input_tokens": await self._count(request)})
        except APIError as error:
            body = self._protocol.error(error.status, error.kind, str(error))
            return JSONResponse(body, status_code=error.status, headers=error.headers)

    async def _count(self, request: Request) -> int:
        caller = self._keys.caller(presented(request.headers.raw), Scope.CHAT)
        self._usage.admit(caller)
        client_body = await body_of(request, self._settings.body_bytes, self._settings.body_s)
        body = self._protocol.prompt(client_body)
        check_template_settings(body, client_templates=self._settings.client_templates)
        checked(body["messages"], self._usage.limits_of(caller).messages)
        user_id = caller.user_id(request.headers.get(USER_ID))
        if caller.episode is not None:
            route = await self._calls.episode_route(caller.episode)
        else:
            route = await self._calls.route(body.get("model"), user_id, request.headers.get(WORKER_ID, ""), "")
        request_body: dict[str, Any] = {name: body[name] for name in _TEMPLATE_FIELDS if name in body}
        if route.model is not None:
            request_body["model"] = route.model
        backend = self._backends[route.backend.name]
        answer = await backend.post(_PATH, request_body, {})
        response = answer.response
        try:
            response_body = backend.redact(await read_body(response))
            answer.outcome = CallOutcome.FAILED if response.status_code >= 500 else CallOutcome.OK
        finally:
            await answer.close()
        status, name = response.status_code, route.backend.name
        if status in (404, 405, 501):
            reason = f"its {_PATH} answered {status}: {error_message(response_body)}"
            raise APIError(501, f"the backend {name} does not count tokens ({reason})", "api_error")
        if status != 200:
            raise APIError(
                status if status >= 400 else 502,
                f"the backend {name} answered {status}: {error_message(response_body)}",
            )
        try:
            return int(json.loads(response_body)["count"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise APIError(502, f"the backend {name} answered {_PATH} without a count", "server_error") from error
