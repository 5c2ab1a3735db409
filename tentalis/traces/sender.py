"""Sends items with POST /v1/traces, using only the standard library."""

import http.client
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

PATH = "/v1/traces"


class GatewayUnavailable(Exception):
    """The gateway did not accept a batch now: send it again later."""


class TraceBatchTooLarge(Exception):
    """A batch is too large for the gateway, or contains an item that it can never accept: send a smaller batch."""


class TraceSender:
    """A connection that stays open between batches. Raises ValueError for an invalid URL."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is not a URL of the form http://host:port")
        self.timeout_s = timeout_s
        self._host, self._port, self._tls = url.hostname, url.port, url.scheme == "https"
        self._path = url.path.rstrip("/").removesuffix("/v1") + PATH
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None

    def send(self, items: Sequence[str]) -> dict[int, str]:
        """Sends items (JSON texts). On return they are on the log, except for those refused permanently (index ->
        reason). Raises GatewayUnavailable, TraceBatchTooLarge."""
        body = ('{"items":[' + ",".join(items) + "]}").encode()
        try:
            status, answer = self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise GatewayUnavailable(
                f"the gateway on {self._host} does not answer: {error or type(error).__name__}"
            ) from error
        if status == 413 or (len(items) > 1 and _rejects_body(status, answer)):
            raise TraceBatchTooLarge(_error_text(answer))
        if _rejects_body(status, answer):
            return {0: _error_text(answer)}
        if status != 201:
            raise GatewayUnavailable(f"the gateway answers {status}: {_error_text(answer)}")
        try:
            outcomes = [(item["status"], item.get("error", "")) for item in json.loads(answer)["items"]]
        except (ValueError, KeyError, TypeError) as error:
            raise GatewayUnavailable(f"the answer is not a gateway's, check the URL: {_error_text(answer)}") from error
        if len(outcomes) != len(items):
            raise GatewayUnavailable(f"the gateway answered for {len(outcomes)} items, but {len(items)} were sent")
        return {index: reason for index, (status, reason) in enumerate(outcomes) if status == "refused"}

    def _post(self, body: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            connection_class = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
            self._connection = connection_class(self._host, self._port, timeout=self.timeout_s)
        self._connection.request("POST", self._path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.will_close:
            self.close()
        return response.status, answer

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _rejects_body(status: int, answer: bytes) -> bool:
    """True if the gateway can never accept the body. A 400 counts only with the gateway's error body: a proxy in front
    of it may send a 400 for other reasons."""
    if status != 400:
        return status == 422
    try:
        return "error" in json.loads(answer)
    except (ValueError, TypeError):
        return False


def _error_text(answer: bytes) -> str:
    text = answer[:500].decode("utf-8", "replace")
    try:
        error = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return text
    return str(error.get("message", error) if isinstance(error, dict) else error)
