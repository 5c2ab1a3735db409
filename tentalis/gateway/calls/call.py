"""A call before a backend is asked: its caller, request and route."""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from schemas.ids import turn_task_id
from schemas.records import LogprobsMode, Message
from tentalis.gateway.backends.backend import BackendClients
from tentalis.gateway.backends.routing import CallRoute, episode_route, next_fallback, route
from tentalis.gateway.backends.served import ServedView
from tentalis.gateway.calls.backend_request import (
    BackendRequest,
    backend_request,
    check_template_settings,
    not_trainable_reason,
    untrainable_request_reason,
)
from tentalis.gateway.calls.capture import AnswerCapture
from tentalis.gateway.calls.earlier_turns import EarlierTurns
from tentalis.gateway.calls.episode_calls import episode_body, episode_session, too_old
from tentalis.gateway.calls.episode_turns import EpisodeTurns
from tentalis.gateway.calls.session_id import (
    CHAT_ENVIRONMENT,
    MAIN,
    USER_ID,
    WORKER_ID,
    CallSession,
    call_session,
    client_session,
    recorded,
)
from tentalis.gateway.http.bodies import body_of
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import Caller, Keys, Scope, presented
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.protocols.messages import checked
from tentalis.gateway.protocols.openai import ClientProtocol
from tentalis.gateway.protocols.responses import ResponsesProtocol, previous_response
from tentalis.gateway.settings import GatewaySettings
from tentalis.inference.chat_messages import normalised, unspoken
from tentalis.inference.episode_key import EpisodeGrant
from tentalis.service.tracing import TRACEPARENT

log = logging.getLogger(__name__)

# Longest wait for an acknowledged version that a restarted server has not loaded yet.
ADAPTER_WAIT_S = 30.0
RETRY_AFTER_S = 5
_SERVED_POLL_S = 0.1


@dataclass(slots=True)
class GatewayCall:
    """A client's call. `recordable`: it may be recorded; `token_refusal`: the backend's error when it was asked for
    tokens; `lost_version`: an assigned version that the backend turned out not to have; `traceparent`: the client's
    trace (W3C); `failed_replicas`: the URLs of the backend's replicas that have failed this call, and `failure` the
    last error; `replica_mode`: the distribution of the log-probs of the replica that answers, None while it is not
    known."""

    event_id: str
    started: float
    protocol: ClientProtocol
    caller: Caller
    user_id: str
    worker_id: str
    session: CallSession
    recordable: bool
    body: dict[str, Any]
    messages: tuple[Message, ...]
    request_extras: str
    route: CallRoute
    backend_request: BackendRequest
    asks_token_ids: bool
    token_refusal: str = ""
    lost_version: str | None = None
    traceparent: str | None = None
    failed_replicas: set[str] = field(default_factory=set)
    failure: APIError | None = None
    replica_mode: LogprobsMode | None = None

    @property
    def task_id(self) -> str:
        """The id of the task that a main turn becomes."""
        return turn_task_id(self.session.session_id, self.event_id)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer: the session, and the call's id in the headers that OpenAI's and Anthropic's clients
        read."""
        return {
            "X-Session-Id": self.session.client_session_id,
            "X-Request-Id": self.event_id,
            "Request-Id": self.event_id,
        }

    def untrainable_request_reason(self) -> str:
        """Returns the reason why no answer to this call can be trained on; "" if it depends on the answer."""
        request = self.backend_request
        return untrainable_request_reason(
            request.body, self.route, tokens=self.asks_token_ids, n=request.n, mode=self.replica_mode
        )

    def not_trainable_reason(self, capture: AnswerCapture) -> str:
        """Returns the reason why this call's turn cannot be trained on; "" if it can."""
        request = self.backend_request
        return not_trainable_reason(
            request.body, self.route, capture, tokens=self.asks_token_ids, n=request.n, mode=self.replica_mode
        )

    def success_headers(self, *, trainable: bool) -> dict[str, str]:
        """Headers of a successful answer: also the task's id, if the turn becomes a task that feedback can name, and
        the name of the fallback that answered."""
        task = self.recordable and self.session.turn_type == MAIN and trainable
        fallback = self.route.instead_of is not None
        return (
            self.headers
            | ({"X-Tentalis-Task-Id": self.task_id} if task else {})
            | ({"X-Tentalis-Fallback": ascii(self.route.backend.name)[1:-1]} if fallback else {})
        )


class CallBuilder:
    """Builds calls from requests."""

    def __init__(
        self,
        settings: GatewaySettings,
        keys: Keys,
        backends: BackendClients,
        served: ServedView,
        metrics: GatewayMetrics,
        usage: KeyUsage,
        earlier_turns: EarlierTurns,
    ) -> None:
        self._settings, self._keys, self._backends = settings, keys, backends
        self._served, self._metrics, self._usage = served, metrics, usage
        self._earlier_turns = earlier_turns
        self._episode_turns = EpisodeTurns()

    async def build(self, request: Request, protocol: ClientProtocol) -> GatewayCall:
        """Builds the call of a request. Raises APIError."""
        started = time.monotonic()
        caller = self._keys.caller(presented(request.headers.raw), Scope.CHAT)
        self._usage.admit(caller)
        limits = self._usage.limits_of(caller)
        client_body = await body_of(request, self._settings.body_bytes, self._settings.body_s)
        headers = request.headers
        user_id = caller.user_id(headers.get(USER_ID))
        namespace = caller.namespace(user_id)
        grant = caller.episode
        # An episode is joined from its recorded turns, so its program cannot opt out.
        recordable = grant is not None or recorded(headers)
        continued = ""
        if isinstance(protocol, ResponsesProtocol):
            session_id = None if grant is None else grant.session_id
            protocol, continued = await self._continuing(
                client_body, namespace, user_id, stored=recordable, session_id=session_id
            )
        body = protocol.body(client_body)
        if grant is not None:
            body = episode_body(body, grant.sampling)
        check_template_settings(body, client_templates=self._settings.client_templates)
        checked_messages = checked(protocol.messages(body), limits.messages)
        messages = normalised(checked_messages)
        request_extras = unspoken(body, checked_messages) if protocol.chat else ""
        if isinstance(protocol, ResponsesProtocol):
            request_extras = protocol.recorded_request(client_body, request_extras)
        worker_id = headers.get(WORKER_ID, "")[:200] if grant is None else grant.worker_id
        if grant is not None:
            session = episode_session(grant)
        else:
            session = call_session(
                headers,
                client_body,
                messages,
                namespace=namespace,
                owner=caller.key_id,
                user_id=user_id,
                default=self._settings.turn_type if protocol.chat else "side",
                continued=continued,
            )
        self._metrics.turns.labels(
            session.turn_type, session.decided_by.value, session.session_by.value, session.reason or "none"
        ).inc()
        if grant is not None:
            call_route = await self.episode_route(grant)
        else:
            call_route = await self.route(body.get("model"), user_id, worker_id, session.session_id)
        request_to_send, asks_token_ids = self._backend_request(body, call_route, protocol, recordable)
        _check_content(request_to_send, limits)
        if grant is not None:
            self._episode_turns.take(grant)
        return GatewayCall(
            # A retry gets another answer and is another turn, even with the same Idempotency-Key.
            event_id=str(uuid.uuid4()),
            started=started,
            protocol=protocol,
            caller=caller,
            user_id=user_id,
            worker_id=worker_id or self._settings.gateway_id,
            session=session,
            recordable=recordable,
            body=body,
            messages=messages,
            request_extras=request_extras,
            route=call_route,
            backend_request=request_to_send,
            asks_token_ids=asks_token_ids,
            traceparent=headers.get(TRACEPARENT),
        )

    async def _continuing(
        self, client_body: dict[str, Any], namespace: str, user_id: str, *, stored: bool, session_id: str | None
    ) -> tuple[ResponsesProtocol, str]:
        """Returns the protocol of a call of the responses API, and the session of the turn that it continues, as the
        client knows it ("" if it continues none). `session_id`: that of an episode, which only continues its own turns.
        Raises APIError."""
        stored = stored and self._earlier_turns.source is not None
        response_id = previous_response(client_body)
        if response_id is None:
            return ResponsesProtocol(stored=stored), ""
        turn = await self._earlier_turns.find(response_id, namespace=namespace, user_id=user_id, session_id=session_id)
        return ResponsesProtocol(turn, stored=stored), client_session(namespace, turn.session_id)

    async def route(self, model: Any, user_id: str, worker_id: str, session_id: str) -> CallRoute:
        """Returns the route of a request for this model. All calls of a session have the same assignment. Raises
        APIError (400, 404, 503)."""
        if not (model is None or isinstance(model, str)):
            raise APIError(400, "model must be a string")
        await self._wait_for_served_versions()
        return self._route(model, user_id, worker_id, session_id)

    async def episode_route(self, grant: EpisodeGrant) -> CallRoute:
        """Returns the route of a call of an episode. Waits until a version is served that is not older than the one
        with which the worker began. Raises APIError (404, 503)."""
        await self._wait_for_served_versions()
        deadline = time.monotonic() + min(ADAPTER_WAIT_S, self._settings.hold_s)
        while too_old(found := self._episode_route(grant), grant):
            if time.monotonic() >= deadline:
                wanted = "a version" if grant.least_version is None else f"version {grant.least_version}"
                raise APIError(
                    503,
                    f"{wanted} of {grant.policy} is not served by {found.backend.name} yet, which the episode needs",
                    "server_error",
                    retry_after_s=RETRY_AFTER_S,
                )
            await asyncio.sleep(_SERVED_POLL_S)
        return found

    def _episode_route(self, grant: EpisodeGrant, *, lost: str | None = None) -> CallRoute:
        def assigned(server_id: str, policy: str) -> str | None:
            found = self._served.assigned(
                server_id,
                policy,
                worker_id=grant.worker_id,
                environment=grant.environment,
                unit=grant.task_id,
            )
            return None if found == lost else found

        return episode_route(
            self._settings,
            grant.policy,
            served=self._served.name,
            assigned=assigned,
            base_models=self._backends.base_models,
        )

    def reroute(self, call: GatewayCall, *, unknown_model: bool) -> None:
        """Routes a call to the version that should answer it now, unless its client has pinned one. `unknown_model`:
        the backend did not have the model; if an assignment chose it, the served version answers. Raises APIError
        (404)."""
        if unknown_model and call.route.assigned:
            log.warning("%s has no %s, which is assigned", call.route.backend.name, call.route.model)
            call.lost_version = call.route.model
        if not call.route.pinned and call.route.instead_of is None:
            session_id, model = call.session.session_id, call.body.get("model")
            call.route = (
                self._route(model, call.user_id, call.worker_id, session_id, lost=call.lost_version)
                if call.caller.episode is None
                else self._episode_route(call.caller.episode, lost=call.lost_version)
            )
            self.rebuild_request(call)

    def has_fallback(self, call: GatewayCall) -> bool:
        """True if a fallback can be asked when the call's backend fails."""
        return next_fallback(self._settings, call.route, self._served.name) is not None

    def fall_back(self, call: GatewayCall) -> bool:
        """Routes a call whose backend failed to the next fallback of its policy. Returns False if there is none."""
        found = next_fallback(self._settings, call.route, self._served.name)
        if found is None:
            return False
        call.route, call.token_refusal, call.failed_replicas = found, "", set()
        self.rebuild_request(call)
        return True

    def rebuild_request(self, call: GatewayCall) -> None:
        """Rebuilds the backend request after the route or the backend has changed."""
        call.backend_request, call.asks_token_ids = self._backend_request(
            call.body, call.route, call.protocol, call.recordable, call.token_refusal
        )

    async def _wait_for_served_versions(self) -> None:
        """Waits until the served versions are known: otherwise a gateway that has just started would take a policy for
        untrained and ask its base model. Raises APIError (503)."""
        deadline = time.monotonic() + min(ADAPTER_WAIT_S, self._settings.hold_s)
        while self._settings.policies and not self._served.caught_up:
            if time.monotonic() >= deadline:
                raise APIError(
                    503,
                    "the served policy versions are not read from the log yet; try again",
                    "server_error",
                    retry_after_s=RETRY_AFTER_S,
                )
            await asyncio.sleep(_SERVED_POLL_S)

    def _route(
        self, model: str | None, user_id: str, worker_id: str, session_id: str, *, lost: str | None = None
    ) -> CallRoute:
        def assigned(server_id: str, policy: str) -> str | None:
            found = self._served.assigned(
                server_id,
                policy,
                worker_id=worker_id or self._settings.gateway_id,
                environment=CHAT_ENVIRONMENT,
                unit=session_id,
            )
            return None if found == lost else found

        return route(
            self._settings,
            model,
            user_id=user_id,
            worker_id=worker_id,
            served=self._served.name,
            assigned=assigned,
            base_models=self._backends.base_models,
        )

    def _backend_request(
        self,
        body: dict[str, Any],
        call_route: CallRoute,
        protocol: ClientProtocol,
        recordable: bool,
        token_refusal: str = "",
    ) -> tuple[BackendRequest, bool]:
        """Returns the backend request, and whether it asks for tokens."""
        asks_token_ids = recordable and not token_refusal and self._backends[call_route.backend.name].asks_token_ids
        return backend_request(body, call_route, chat=protocol.chat, tokens=asks_token_ids), asks_token_ids


def _check_content(request: BackendRequest, limits: KeyLimits) -> None:
    """Raises APIError (400) for a request that asks for more than its key may."""
    if request.n > limits.choices:
        raise APIError(
            400, f"{request.n:,} answers are asked for (n, or n times prompts); the limit is {limits.choices}"
        )
    stops = request.body.get("stop")
    if isinstance(stops, list) and len(stops) > limits.stops:
        raise APIError(400, f"stop has {len(stops):,} strings; the limit is {limits.stops}")
