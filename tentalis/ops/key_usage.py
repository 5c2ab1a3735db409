"""Asks a gateway for the usage of its API keys."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from tentalis.gateway.calls.backend_call import error_message
from tentalis.gateway.http.usage_route import UsageAnswer

_TIMEOUT_S = 10.0


class GatewayAway(Exception):
    """No gateway answers at a URL."""


class UsageRefused(Exception):
    """A gateway does not tell the usage of its keys."""


def read_usage(url: str, api_key: str | None, days: int) -> UsageAnswer:
    """Returns the usage of the last UTC days, today included. `api_key`: None if the gateway requires none.

    Raises GatewayAway, UsageRefused.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{base}/v1/usage", params={"days": days}, headers=headers, timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise GatewayAway(f"no gateway answers at {base}: {error}") from error
    if response.status_code != 200:
        raise UsageRefused(f"the gateway at {base} answered {response.status_code}: {error_message(response.content)}")
    try:
        return UsageAnswer.model_validate_json(response.content)
    except ValidationError as error:
        raise UsageRefused(f"{base} did not answer as a gateway does") from error
