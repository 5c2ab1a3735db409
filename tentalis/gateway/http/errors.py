"""Errors of the gateway itself, with their HTTP status."""

SPENT = "insufficient_quota"
"""The kind of a refusal that a retry within the day cannot change, as in OpenAI's API."""


class APIError(Exception):
    """A call that the gateway refuses. `status`: the HTTP status; `kind`: the error type in OpenAI's terms."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the error response."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.kind == SPENT:
            headers["x-should-retry"] = "false"  # the clients of OpenAI and Anthropic would retry at once
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def openai_error(status: int, kind: str, message: str) -> dict[str, object]:
    """An error body in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
