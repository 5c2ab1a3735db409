"""Origin check of a gateway without API keys: refuses requests from other sites' pages in a local browser."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tentalis.gateway.http.errors import APIError, openai_error

Headers = Iterable[tuple[bytes, bytes]]

# Suffixes of names that no public site can own or point at an address.
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")


class OriginGuard:
    """Middleware that answers only the programs of this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request as an ASGI application."""
        if scope["type"] == "http":
            try:
                check_local_request(scope["headers"])
            except APIError as error:
                body = openai_error(error.status, error.kind, str(error))
                await JSONResponse(body, status_code=error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def check_local_request(headers: Headers) -> None:
    """Raises APIError (403) for a request that a page of another site may have sent.

    A page can post to any address that its browser reaches; Origin then names its site. A site can also point its
    own name at our address (DNS rebinding); Host then holds that name.
    """
    by_name = dict(headers)
    for header in (b"host", b"origin"):
        value = by_name.get(header, b"").decode("latin-1")
        if value and not (_may_be_host(value) if header == b"host" else _may_be_origin(value)):
            raise APIError(
                403,
                f"this gateway requires no API key, so it answers only programs of this machine, and no page of "
                f"another site ({header.decode().title()}: {value[:200]}). Start the gateway with --keys to require "
                "API keys, or with --no-keys to answer every request",
                "permission_error",
            )


def _may_be_host(value: str) -> bool:
    """True if a request to this host was meant for this machine: an address, or a name that no public site can have."""
    name = _host_of(f"//{value}")
    return _address(name) is not None or (name != "" and "." not in name) or name.endswith(_PRIVATE_SUFFIXES)


def _may_be_origin(value: str) -> bool:
    """True for a page of this machine, or of an installed program."""
    if value != "null" and not value.startswith(("http:", "https:")):
        return True
    name = _host_of(value)
    address = _address(name)
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def _host_of(url: str) -> str:
    """The host of a URL, "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
