"""The backends: an HTTP client, the served models and the token id support of each."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tentalis.gateway.backends.connection_pool import ConnectionPool
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.settings import BackendSettings, TokenIdSupport

log = logging.getLogger(__name__)

_DISCOVERY_INTERVAL_S, _DISCOVERY_RETRY_S = 30.0, 1.0
_CONNECT_TIMEOUT_S = 10.0
_TOKEN_IDS_RETRY_S = 300.0


@dataclass(slots=True)
class BackendClient:
    """A backend and its discovered properties."""

    settings: BackendSettings
    http: httpx.AsyncClient
    api_key: str | None
    models: tuple[str, ...]
    warned: bool = field(default=False)
    _token_ids_from: float = field(default=0.0)

    @property
    def asks_token_ids(self) -> bool:
        """True if the gateway asks it for token ids."""
        return self.settings.token_ids is not TokenIdSupport.NO and time.monotonic() >= self._token_ids_from

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx.Response:
        """Returns the response with its body unread; the caller closes it. Raises APIError (502, 504)."""
        name = self.settings.name
        content = json.dumps(body, separators=(",", ":")).encode()
        request = self.http.build_request("POST", path, content=content, headers=dict(headers))
        try:
            return await self.http.send(request, stream=True)
        except httpx.TimeoutException as error:
            raise APIError(504, f"the backend {name} did not answer in time", "server_error") from error
        except httpx.TransportError as error:
            log.warning("the backend %s cannot be reached: %r", name, error)
            raise APIError(502, f"the backend {name} cannot be reached", "server_error", retry_after_s=1) from error

    def redact(self, body: bytes) -> bytes:
        """Returns an error body without the backend's own key."""
        return body.replace(self.api_key.encode(), b"[key]") if self.api_key else body

    def pause_token_ids(self, reason: str) -> None:
        """Stops asking for token ids for a while: the backend refused a call with them and answered it without."""
        self._token_ids_from = time.monotonic() + _TOKEN_IDS_RETRY_S
        log.warning(
            "the backend %s gives no token ids (%s): its answers are recorded, but cannot be trained on; the gateway "
            "asks again in %g s (set token_ids: no to stop asking)",
            self.settings.name,
            reason[:200],
            _TOKEN_IDS_RETRY_S,
        )


class BackendClients:
    """All backends of a gateway. Close them at the end."""

    def __init__(self, settings: Sequence[BackendSettings], keys: Mapping[str, str | None]) -> None:
        """`keys`: the API key of each backend, by its name."""
        self._by_name = {backend.name: _backend_client(backend, keys.get(backend.name)) for backend in settings}

    def __getitem__(self, name: str) -> BackendClient:
        return self._by_name[name]

    @property
    def base_models(self) -> dict[str, tuple[str, ...]]:
        """The known base models of each backend, by its name."""
        return {name: backend.models for name, backend in self._by_name.items()}

    async def discover_models(self) -> None:
        """Periodically asks the backends without configured models which models they serve, until cancelled."""
        while True:
            undeclared = [backend for backend in self._by_name.values() if not backend.settings.models]
            await asyncio.gather(*(self._discover_models_of(backend) for backend in undeclared))
            all_known = all(backend.models for backend in undeclared)
            await asyncio.sleep(_DISCOVERY_INTERVAL_S if all_known else _DISCOVERY_RETRY_S)

    async def _discover_models_of(self, backend: BackendClient) -> None:
        try:
            response = await backend.http.get("/v1/models", timeout=_CONNECT_TIMEOUT_S)
            cards = response.raise_for_status().json()["data"]
            backend.models = tuple(str(card["id"]) for card in cards if not card.get("parent"))
            backend.warned = False
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            if not backend.warned:
                log.warning("the backend %s does not list its models: %r", backend.settings.name, error)
            backend.warned = True

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(backend.http.aclose() for backend in self._by_name.values()))


def _backend_client(settings: BackendSettings, key: str | None) -> BackendClient:
    headers = {"accept-encoding": "identity", "user-agent": "tentalis-gateway", "content-type": "application/json"}
    client = httpx.AsyncClient(
        base_url=settings.base_url,
        headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
        timeout=httpx.Timeout(settings.timeout_s, connect=_CONNECT_TIMEOUT_S),
        transport=ConnectionPool(settings.base_url),
    )
    return BackendClient(settings, client, key, settings.models)
