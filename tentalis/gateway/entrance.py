"""Where nobody is asked for a key: what another site's page has sent through a browser of this machine is refused."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tentalis.gateway.failure import Refused, openai_error

Headers = Iterable[tuple[bytes, bytes]]

# Names that no site of the internet can have, or give to an address.
_NEAR = (".localhost", ".local", ".internal")


class Entrance:
    """The application, for this machine's own programs alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The request as an ASGI application."""
        if scope["type"] == "http":
            try:
                from_here(scope["headers"])
            except Refused as error:
                body = openai_error(error.status, error.kind, str(error))
                await JSONResponse(body, status_code=error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def from_here(headers: Headers) -> None:
    """Raises Refused (403) for what a page of another site may have sent. A page can post to any address that its
    browser reaches, and is named in Origin; and its site can give a name of its own our address, which Host then is."""
    given = dict(headers)
    for header in (b"host", b"origin"):
        value = given.get(header, b"").decode("latin-1")
        if value and not (_may_be_host(value) if header == b"host" else _may_be_origin(value)):
            raise Refused(
                403,
                f"nobody is asked for a key here, so only this machine's own programs are answered, and no page of "
                f"another site ({header.decode().title()}: {value[:200]}). Start the gateway with --keys to answer "
                "whoever has one, or with --no-keys to answer anybody",
                "permission_error",
            )


def _may_be_host(value: str) -> bool:
    """Whether a request to this name was meant for this machine: an address, or a name of no site."""
    name = _name(f"//{value}")
    return _address(name) is not None or (name != "" and "." not in name) or name.endswith(_NEAR)


def _may_be_origin(value: str) -> bool:
    """Whether this is a page of this machine, or an installed program that has pages."""
    if value != "null" and not value.startswith(("http:", "https:")):
        return True
    name = _name(value)
    address = _address(name)
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def _name(url: str) -> str:
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
