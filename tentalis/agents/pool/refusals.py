"""The refusals of a pool, as answers of its contract."""

from typing import Any


class PoolError(Exception):
    """A call that the pool refuses. `status`: the HTTP status; `code`: its name for programs; `retry_after_s`: the
    pause before the same call may succeed."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"ok": False, "error": str(self), "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})
