"""A call as far as it is known before a backend is asked: who asks for what, and where it goes."""

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from schemas.ids import turn_task_id
from schemas.records import Message
from tentalis.gateway.asking import Asked, asked
from tentalis.gateway.backends import Backends
from tentalis.gateway.bodies import body_of
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Caller, Keys, Scope, presented
from tentalis.gateway.measures import Measures
from tentalis.gateway.messages import checked, normalised, unspoken
from tentalis.gateway.routing import Route, route
from tentalis.gateway.served import ServedView
from tentalis.gateway.sessions_of import MAIN, USER_ID, WORKER_ID, Turn, recorded, turn_of
from tentalis.gateway.settings import GatewaySettings
from tentalis.gateway.shapes import Shape

# A version that was acknowledged may not be loaded where its server has just started again.
ADAPTER_S = 30.0
RETRY_AFTER_S = 5
_INFORMED_EVERY_S = 0.1


@dataclass(slots=True)
class Call:
    """What a client asks. `keep`: it may be written down; `refused_tokens`: what the backend said when it was asked for
    tokens."""

    event_id: str
    began: float
    shape: Shape
    caller: Caller
    user_id: str
    worker_id: str
    turn: Turn
    keep: bool
    body: dict[str, Any]
    messages: tuple[Message, ...]
    unspoken: str
    route: Route
    ask: Asked
    tokens: bool
    refused_tokens: str = ""

    @property
    def task_id(self) -> str:
        """Of the task that a main turn becomes."""
        return turn_task_id(self.turn.session_id, self.event_id)

    @property
    def headers(self) -> dict[str, str]:
        """What every answer says of the call; its id by the names under which OpenAI's and Anthropic's clients look."""
        return {"X-Session-Id": self.turn.shown, "X-Request-Id": self.event_id, "Request-Id": self.event_id}

    def answered(self, *, trainable: bool) -> dict[str, str]:
        """What a good answer says of the call: also its task's id, where it will have one that feedback can name."""
        task = self.keep and self.turn.turn_type == MAIN and trainable
        return self.headers | ({"X-Tentalis-Task-Id": self.task_id} if task else {})


class Calls:
    """Makes calls of requests."""

    def __init__(
        self, settings: GatewaySettings, keys: Keys, backends: Backends, served: ServedView, measures: Measures
    ) -> None:
        self._settings, self._keys, self._backends = settings, keys, backends
        self._served, self._measures = served, measures

    async def of(self, request: Request, shape: Shape) -> Call:
        """The call that a request is. Raises Refused."""
        began = time.monotonic()
        caller = self._keys.caller(presented(request.headers.raw), Scope.CHAT)
        given = await body_of(request, self._settings.body_bytes, self._settings.body_s)
        body = shape.body(given)
        said = checked(shape.messages(body))
        messages = normalised(said)
        headers = request.headers
        user_id = caller.user_id(headers.get(USER_ID))
        worker_id = headers.get(WORKER_ID, "")[:200]
        turn = turn_of(
            headers,
            given,
            messages,
            namespace=caller.namespace(user_id),
            owner=caller.key_id,
            user_id=user_id,
            default=self._settings.turn_type if shape.chat else "side",
        )
        self._measures.turns.labels(
            turn.turn_type, turn.decided_by.value, turn.session_by.value, turn.reason or "none"
        ).inc()
        keep, to = recorded(headers), await self.route(body.get("model"), user_id, worker_id)
        ask, tokens = self._aimed(body, to, shape, keep)
        return Call(
            # A retry has another answer, and is another turn, whatever its Idempotency-Key says.
            event_id=str(uuid.uuid4()),
            began=began,
            shape=shape,
            caller=caller,
            user_id=user_id,
            worker_id=worker_id or self._settings.gateway_id,
            turn=turn,
            keep=keep,
            body=body,
            messages=messages,
            unspoken=unspoken(body, said) if shape.chat else "",
            route=to,
            ask=ask,
            tokens=tokens,
        )

    async def route(self, model: Any, user_id: str, worker_id: str) -> Route:
        """Where a request for this model goes. Raises Refused (400, 404, 503)."""
        if not (model is None or isinstance(model, str)):
            raise Refused(400, "model must be a text")
        await self._informed()
        return self._route(model, user_id, worker_id)

    def rerouted(self, call: Call) -> None:
        """Sends a call to what is served now, unless its client has named the version. Raises Refused (404)."""
        if not call.route.pinned:
            call.route = self._route(call.body.get("model"), call.user_id, call.worker_id)
            self.aim(call)

    def aim(self, call: Call) -> None:
        """Makes anew what is asked, after the route or the backend has changed."""
        call.ask, call.tokens = self._aimed(call.body, call.route, call.shape, call.keep, call.refused_tokens)

    async def _informed(self) -> None:
        """Waits until it is known what is served: a gateway that has just started would take a policy for untrained and
        ask its base model. Raises Refused (503)."""
        deadline = time.monotonic() + min(ADAPTER_S, self._settings.hold_s)
        while self._settings.policies and not self._served.caught_up:
            if time.monotonic() >= deadline:
                raise Refused(
                    503,
                    "which versions are served cannot be read from the log yet; try again",
                    "server_error",
                    retry_after_s=RETRY_AFTER_S,
                )
            await asyncio.sleep(_INFORMED_EVERY_S)

    def _route(self, model: str | None, user_id: str, worker_id: str) -> Route:
        return route(
            self._settings,
            model,
            user_id=user_id,
            worker_id=worker_id,
            served=self._served.name,
            base_models=self._backends.base_models,
        )

    def _aimed(
        self, body: dict[str, Any], to: Route, shape: Shape, keep: bool, refused_tokens: str = ""
    ) -> tuple[Asked, bool]:
        """What is asked of the backend, and whether that is for tokens too."""
        tokens = keep and not refused_tokens and self._backends[to.backend.name].tokens
        return asked(body, to, chat=shape.chat, tokens=tokens), tokens
