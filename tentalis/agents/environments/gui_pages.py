"""The pages of a task, as the browser gets them: files of one folder under one address, and nothing else.

There is no server: the browser asks before each request, and is answered with a file. So pages cannot reach anything,
and what they send is received here, outside of the browser.
"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urljoin, urlsplit

ORIGIN = "http://pages.test"
"""The address of the pages. No such host exists (RFC 6761)."""
MOST_FORMS = 200
"""Forms of an episode that are kept: the first ones."""
FORM_BYTES = 64 * 1024
"""Bytes of a form that are read; a longer one has no fields."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".htm": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".xml": "text/xml",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".ico": "image/x-icon",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".ttf": "font/ttf",
}
_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
_URLENCODED = "application/x-www-form-urlencoded"


@dataclass(frozen=True, slots=True)
class PageResponse:
    """The answer to a request of the browser."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class ReceivedForm:
    """A form that a page sent: its method, the page that it was sent to, and its fields. Of several fields with the
    same name the last one counts."""

    method: str
    page: str
    fields: Mapping[str, str]


class LocalPages:
    """The files of a folder as pages. `fixed`: the first page is the only one, and a request for another is refused."""

    def __init__(self, folder: Path, *, fixed: bool = False) -> None:
        self._folder = folder.resolve()
        self._fixed = fixed
        self._opened = False
        self.forms: list[ReceivedForm] = []
        """The forms that pages sent, in order."""

    def url(self, page: str) -> str:
        """Returns the address of a page by its path in the folder."""
        path, mark, query = page.partition("?")
        return f"{ORIGIN}/{quote(path.lstrip('/'))}{mark}{query}"

    def allowed(self, target: str, current: str) -> str | None:
        """Returns the address that a policy means with `target` on the page `current`; None if it is not one of these
        pages."""
        if any(ord(character) < 33 for character in target):
            return None
        try:
            url = urljoin(current if current.startswith(f"{ORIGIN}/") else f"{ORIGIN}/", target)
            return url if self._file(url) is not None else None
        except ValueError:
            return None

    def answer(self, request: Mapping[str, Any], *, document: bool) -> PageResponse | None:
        """Returns the answer to a request (the protocol's Request), None if it is refused. `document`: it is for a page
        or a frame. Keeps the forms that are sent."""
        if document and self._fixed and self._opened:
            return None
        url = urlsplit(str(request["url"]))
        if f"{url.scheme}://{url.netloc}" != ORIGIN:
            return None
        self._opened = self._opened or document
        self._receive(request, document)
        file = self._file(str(request["url"]))
        if file is None:
            return PageResponse(404, {"Content-Type": "text/plain; charset=utf-8"}, b"There is no such page.")
        kind = _TYPES.get(file.suffix.lower(), "application/octet-stream")
        headers = {"Content-Type": kind, "Cache-Control": "no-store", "Content-Security-Policy": _POLICY}
        return PageResponse(200, headers, file.read_bytes())

    def _receive(self, request: Mapping[str, Any], document: bool) -> None:
        url = urlsplit(str(request["url"]))
        sent = str(request.get("postData", ""))
        if len(self.forms) >= MOST_FORMS or not (sent or (url.query and document)):
            return
        headers = {name.lower(): str(value) for name, value in request.get("headers", {}).items()}
        given = sent if headers.get("content-type", "").startswith(_URLENCODED) else url.query
        fields = {} if len(given) > FORM_BYTES else dict(parse_qsl(given, keep_blank_values=True))
        self.forms.append(ReceivedForm(str(request["method"]), shown_page(str(request["url"])), fields))

    def _file(self, url: str) -> Path | None:
        """Returns the file behind an address; None if there is none, or if it is not in the folder."""
        parts = urlsplit(url)
        if f"{parts.scheme}://{parts.netloc}" != ORIGIN:
            return None
        name = posixpath.normpath(unquote(parts.path)).lstrip("/")
        try:
            file = (self._folder / name).resolve()
            if file.is_dir():
                file = (file / "index.html").resolve()
            inside = file.is_relative_to(self._folder) and file.is_file()
        except (OSError, ValueError):  # a name that no file can have
            return None
        return file if inside else None


def shown_page(url: str) -> str:
    """Returns an address as the policy and checks know it: the path of a page in the folder, without query.

    >>> shown_page("http://pages.test/shop/tea.html?n=2#top"), shown_page("about:blank")
    ('shop/tea.html', 'about:blank')
    """
    parts = urlsplit(url)
    return unquote(parts.path).lstrip("/") if f"{parts.scheme}://{parts.netloc}" == ORIGIN else url
