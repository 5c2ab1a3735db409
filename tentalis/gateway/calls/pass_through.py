"""Calls that are passed to a base model and back: embeddings and rerankings. They are neither recorded nor trained."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from tentalis.gateway.backends.backend import BackendClient, BackendClients
from tentalis.gateway.calls.backend_call import AnswerBrokeOff, error_message, read_body
from tentalis.gateway.calls.backend_request import check_template_settings
from tentalis.gateway.calls.session_id import BODY_FIELDS, USER_ID
from tentalis.gateway.http.bodies import body_of
from tentalis.gateway.http.errors import APIError, openai_error
from tentalis.gateway.http.keys import Caller, Keys, Scope, presented
from tentalis.gateway.http.response import WorkResponse, send_response
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.settings import GatewaySettings
from tentalis.inference.replicas.router import CallOutcome

PATHS = ("/v1/embeddings", "/v1/rerank")


class PassThrough:
    """POST on one of PATHS. Counted and limited as calls are."""

    def __init__(
        self, settings: GatewaySettings, keys: Keys, backends: BackendClients, usage: KeyUsage, metrics: GatewayMetrics
    ) -> None:
        self._settings, self._keys, self._backends = settings, keys, backends
        self._usage, self._metrics = usage, metrics

    async def answer(self, request: Request, path: str) -> Response:
        """Returns the backend's answer, or an error: 400 for a chat template that the settings do not allow, 404 for a
        model that no backend serves, 501 if its backend has no such path."""
        try:
            caller = self._keys.caller(presented(request.headers.raw), Scope.CHAT)
            caller.user_id(request.headers.get(USER_ID))
            self._usage.admit(caller)
            body = await body_of(request, self._settings.body_bytes, self._settings.body_s)
            check_template_settings(body, client_templates=self._settings.client_templates)
            backend = self._backend_of(body.get("model"))
        except APIError as error:
            return _error_response(error)
        sent = {name: value for name, value in body.items() if name not in BODY_FIELDS}
        return WorkResponse(lambda send: self._forward(send, caller, backend, path, sent))

    def _backend_of(self, model: Any) -> BackendClient:
        """Returns the backend that serves a base model. Policies make no vectors. Raises APIError (400, 404)."""
        if not isinstance(model, str) or not model:
            raise APIError(400, "model must be a string: the name of a base model")
        known = self._backends.base_models
        for name, models in known.items():
            if model in models:
                return self._backends[name]
        there = ", ".join(sorted({each for models in known.values() for each in models}))
        raise APIError(404, f"no backend has the base model {model!r}; available: {there}", "not_found_error")

    async def _forward(
        self, send: Send, caller: Caller, backend: BackendClient, path: str, body: dict[str, Any]
    ) -> None:
        try:
            with self._usage.running(caller):
                answer = await self._ask(caller, backend, path, body)
        except APIError as error:
            answer = _error_response(error)
        self._metrics.calls.labels(path, str(answer.status_code)).inc()
        await send_response(send, answer)

    async def _ask(self, caller: Caller, backend: BackendClient, path: str, body: dict[str, Any]) -> Response:
        backend_answer = await backend.post(path, body, {})
        response = backend_answer.response
        try:
            content = backend.redact(await read_body(response))
            backend_answer.outcome = CallOutcome.OK
        except AnswerBrokeOff:
            backend_answer.outcome = CallOutcome.FAILED
            raise
        finally:
            await backend_answer.close()
        status, name = response.status_code, backend.settings.name
        if status in (404, 405, 501):
            raise APIError(501, f"the backend {name} has no {path} (it answered {status}: {error_message(content)})")
        if status == 200:
            self._usage.spend(caller, _tokens(content))
        return Response(content, status, media_type=response.headers.get("content-type", "application/json"))


def _tokens(content: bytes) -> int:
    """The tokens that an answer reports; 0 if it reports none."""
    try:
        total = json.loads(content)["usage"]["total_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return total if isinstance(total, int) and not isinstance(total, bool) and total > 0 else 0


def _error_response(error: APIError) -> Response:
    body = openai_error(error.status, error.kind, str(error))
    return JSONResponse(body, status_code=error.status, headers=error.headers)
