"""POST /v1/traces, with the standard library alone."""

import http.client
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

PATH = "/v1/traces"


class Away(Exception):
    """The gateway did not take a batch now: it is to be sent again."""


class TooLarge(Exception):
    """A batch is too large for it, or holds something that it can never take: fewer at once may do."""


class Sender:
    """One connection, kept open from batch to batch. Raises ValueError for a URL that is none."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is no URL of the form http://host:port")
        self.timeout_s = timeout_s
        self._host, self._port, self._tls = url.hostname, url.port, url.scheme == "https"
        self._path = url.path.rstrip("/").removesuffix("/v1") + PATH
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None

    def send(self, items: Sequence[str]) -> dict[int, str]:
        """Sends items (JSON texts); once it returns they are on the log, but for those that are refused for good (place
        -> why). Raises Away, TooLarge."""
        body = ('{"items":[' + ",".join(items) + "]}").encode()
        try:
            status, answer = self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Away(f"the gateway on {self._host} does not answer: {error or type(error).__name__}") from error
        if status == 413 or (len(items) > 1 and _is_of_the_body(status, answer)):
            raise TooLarge(_said(answer))
        if _is_of_the_body(status, answer):
            return {0: _said(answer)}
        if status != 201:
            raise Away(f"the gateway answers {status}: {_said(answer)}")
        try:
            became = [(item["status"], item.get("error", "")) for item in json.loads(answer)["items"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Away(f"the gateway's answer is not that of a gateway: {_said(answer)}") from error
        if len(became) != len(items):
            raise Away(f"the gateway speaks of {len(became)} items, {len(items)} were sent")
        return {at: why for at, (status, why) in enumerate(became) if status == "refused"}

    def _post(self, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=self.timeout_s)
        self._connection.request("POST", self._path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.will_close:
            self.close()
        return response.status, answer

    def close(self) -> None:
        """Hangs up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_of_the_body(status: int, answer: bytes) -> bool:
    """Whether a gateway says that it can never take what it was sent. Of a 400 only its own word counts: what stands
    before it says 400 for reasons of its own."""
    if status != 400:
        return status == 422
    try:
        return "error" in json.loads(answer)
    except (ValueError, TypeError):
        return False


def _said(answer: bytes) -> str:
    text = answer[:500].decode("utf-8", "replace")
    try:
        error = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return text
    return str(error.get("message", error) if isinstance(error, dict) else error)
