"""The backends: one HTTP client each, what they serve, and whether they give token ids."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tentalis.gateway.failure import Refused
from tentalis.gateway.lanes import Lanes
from tentalis.gateway.settings import BackendSettings, Tokens

log = logging.getLogger(__name__)

_ASK_AGAIN_S, _ASK_SOON_S = 30.0, 1.0
_CONNECT_S = 10.0
_TOKENS_AGAIN_S = 300.0


@dataclass(slots=True)
class Backend:
    """A backend and what was learnt of it."""

    settings: BackendSettings
    http: httpx.AsyncClient
    secret: str | None
    models: tuple[str, ...]
    warned: bool = field(default=False)
    _tokens_from: float = field(default=0.0)

    @property
    def tokens(self) -> bool:
        """Whether it is asked for token ids."""
        return self.settings.token_ids is not Tokens.NO and time.monotonic() >= self._tokens_from

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """The answer, its body still to be read and the response to be closed. Raises Refused (502, 504)."""
        name = self.settings.name
        content = json.dumps(body, separators=(",", ":")).encode()
        request = self.http.build_request("POST", path, content=content, headers=dict(headers))
        try:
            return await self.http.send(request, stream=True)
        except httpx.TimeoutException as error:
            raise Refused(504, f"the backend {name} did not answer in time", "server_error") from error
        except httpx.TransportError as error:
            log.warning("the backend %s cannot be reached: %r", name, error)
            raise Refused(502, f"the backend {name} cannot be reached", "server_error", retry_after_s=1) from error

    def redacted(self, body: bytes) -> bytes:
        """An error body without the backend's own key."""
        return body.replace(self.secret.encode(), b"[key]") if self.secret else body

    def gives_no_tokens(self, why: str) -> None:
        """It refused a call with them, and answered the same one without: it is left in peace for a while."""
        self._tokens_from = time.monotonic() + _TOKENS_AGAIN_S
        log.warning(
            "the backend %s gives no token ids (%s): what it says is recorded, but cannot be trained on; it is asked "
            "again in %g s, unless token_ids: no says that it need not be",
            self.settings.name,
            why[:200],
            _TOKENS_AGAIN_S,
        )


class Backends:
    """All of a gateway's. Close them in the end."""

    def __init__(self, settings: Sequence[BackendSettings], keys: Mapping[str, str | None]) -> None:
        """`keys`: by backend, its own API key."""
        self._all = {each.name: _backend(each, keys.get(each.name)) for each in settings}

    def __getitem__(self, name: str) -> Backend:
        return self._all[name]

    @property
    def base_models(self) -> dict[str, tuple[str, ...]]:
        """By backend, the names of its base models as far as they are known."""
        return {name: backend.models for name, backend in self._all.items()}

    async def learn(self) -> None:
        """Asks those whose models nobody has named, again and again until cancelled."""
        while True:
            unnamed = [backend for backend in self._all.values() if not backend.settings.models]
            await asyncio.gather(*(self._learn(backend) for backend in unnamed))
            known = all(backend.models for backend in unnamed)
            await asyncio.sleep(_ASK_AGAIN_S if known else _ASK_SOON_S)

    async def _learn(self, backend: Backend) -> None:
        try:
            response = await backend.http.get("/v1/models", timeout=_CONNECT_S)
            cards = response.raise_for_status().json()["data"]
            backend.models = tuple(str(card["id"]) for card in cards if not card.get("parent"))
            backend.warned = False
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not backend.warned:
                log.warning("the backend %s does not say which models it serves: %r", backend.settings.name, error)
            backend.warned = True

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(backend.http.aclose() for backend in self._all.values()))


def _backend(settings: BackendSettings, key: str | None) -> Backend:
    headers = {"accept-encoding": "identity", "user-agent": "tentalis-gateway", "content-type": "application/json"}
    client = httpx.AsyncClient(
        base_url=settings.base_url,
        headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
        timeout=httpx.Timeout(settings.timeout_s, connect=_CONNECT_S),
        transport=Lanes(settings.base_url),
    )
    return Backend(settings, client, key, settings.models)
