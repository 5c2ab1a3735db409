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
from tentalis.gateway.backends.logprobs import LogprobsChecks
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.settings import BackendSettings, TokenIdSupport
from tentalis.inference.replicas.probe import ReplicaProbes, listed_models, log_change
from tentalis.inference.replicas.router import (
    FAILURES_PER_CALL,
    CallOutcome,
    RepeatReason,
    ReplicaLease,
    ReplicaRouter,
)

log = logging.getLogger(__name__)

_DISCOVERY_INTERVAL_S, _DISCOVERY_RETRY_S = 30.0, 1.0
_CONNECT_TIMEOUT_S = 10.0
_TOKEN_IDS_RETRY_S = 300.0


class BackendFailed(APIError):
    """No replica of a backend could answer a call."""


class VersionNotListed(APIError):
    """No replica of a backend lists the version (404)."""


@dataclass(slots=True)
class BackendAnswer:
    """A response whose body is unread, and the replica that gives it. `outcome`: what the replica is told to have done
    when the answer is closed; set it when it is known."""

    response: httpx.Response
    lease: ReplicaLease
    router: ReplicaRouter
    outcome: CallOutcome = CallOutcome.GIVEN_UP

    async def close(self) -> None:
        """Closes the response and reports the outcome."""
        try:
            await self.response.aclose()
        finally:
            self.router.finish(self.lease, self.outcome)


@dataclass(slots=True)
class BackendClient:
    """A backend, its replicas and its discovered properties. `https`: the HTTP client of each replica, by its URL."""

    settings: BackendSettings
    https: dict[str, httpx.AsyncClient]
    api_key: str | None
    models: tuple[str, ...]
    router: ReplicaRouter
    probes: ReplicaProbes
    warned: bool = field(default=False)
    _token_ids_from: float = field(default=0.0)

    @property
    def asks_token_ids(self) -> bool:
        """True if the gateway asks it for token ids."""
        return self.settings.token_ids is not TokenIdSupport.NO and time.monotonic() >= self._token_ids_from

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        key: str = "",
        failed: set[str] | None = None,
        last_resort: bool = True,
    ) -> BackendAnswer:
        """Returns the answer of the replica that `key` prefers, or of another one if that one cannot be reached; the
        caller closes it.

        `failed`: the replicas that have failed this call; those that fail now are added. `last_resort`: ask a replica
        even if the breakers of all are open. Raises BackendFailed (502, 504), VersionNotListed (404).
        """
        failed = set() if failed is None else failed
        model, content = body.get("model"), json.dumps(body, separators=(",", ":")).encode()
        if len(self.https) > 1:
            await self.probes.before_call(model)
        error: BackendFailed | None = None
        while len(failed) < FAILURES_PER_CALL:
            lease = self.router.pick(key, model, without=failed, any_state=last_resort)
            if lease is None:
                break
            if failed:
                self.router.repeats[RepeatReason.FAILED] += 1
                log.warning("a call of the backend %s is repeated at %s", self.settings.name, lease.url)
            http = self.https[lease.url]
            request = http.build_request("POST", path, content=content, headers=dict(headers))
            try:
                return BackendAnswer(await http.send(request, stream=True), lease, self.router)
            except httpx.TransportError as problem:
                self.router.finish(lease, CallOutcome.FAILED)
                failed.add(lease.url)
                error = self._failure(problem, lease.url)
                if error.status == 504:  # the client has waited long enough
                    raise error from problem
            except BaseException:
                self.router.finish(lease, CallOutcome.GIVEN_UP)
                raise
        if error is None and not failed and self.router.lacks(model):
            raise VersionNotListed(
                404, f"no replica of the backend {self.settings.name} has {model} now", "not_found_error"
            )
        raise error or BackendFailed(
            502, f"no replica of the backend {self.settings.name} can be asked now", "server_error", retry_after_s=1
        )

    def _failure(self, problem: httpx.TransportError, url: str) -> BackendFailed:
        name = self.settings.name
        if isinstance(problem, httpx.TimeoutException) and not isinstance(problem, httpx.ConnectTimeout):
            return BackendFailed(504, f"the backend {name} did not answer in time", "server_error")
        log.warning("the backend %s cannot be reached at %s: %r", name, url, problem)
        return BackendFailed(502, f"the backend {name} cannot be reached", "server_error", retry_after_s=1)

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
        self.logprobs = LogprobsChecks(settings, keys)

    def __getitem__(self, name: str) -> BackendClient:
        return self._by_name[name]

    @property
    def routers(self) -> list[ReplicaRouter]:
        """The router of each backend."""
        return [backend.router for backend in self._by_name.values()]

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
        for url, http in backend.https.items():
            try:
                response = await http.get("/v1/models", timeout=_CONNECT_TIMEOUT_S)
                cards = response.raise_for_status().json()["data"]
                backend.models = tuple(str(card["id"]) for card in cards if not card.get("parent"))
                backend.warned = False
                return
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
                if not backend.warned:
                    log.warning("the backend %s does not list its models at %s: %r", backend.settings.name, url, error)
        backend.warned = True

    async def close(self) -> None:
        """Ends the probes and closes the connections."""
        await asyncio.gather(*(backend.probes.close() for backend in self._by_name.values()))
        await asyncio.gather(*(http.aclose() for backend in self._by_name.values() for http in backend.https.values()))
        await self.logprobs.close()


def _backend_client(settings: BackendSettings, key: str | None) -> BackendClient:
    headers = {"accept-encoding": "identity", "user-agent": "tentalis-gateway", "content-type": "application/json"}
    https = {
        url: httpx.AsyncClient(
            base_url=url,
            headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(settings.timeout_s, connect=_CONNECT_TIMEOUT_S),
            transport=ConnectionPool(url),
        )
        for url in settings.base_urls
    }
    router = ReplicaRouter(settings.base_urls, time.monotonic, log_change)
    probes = ReplicaProbes(router, lambda url: listed_models(https[url]))
    return BackendClient(settings, https, key, settings.models, router, probes)
