"""The errors of an object store, in words for an operator. Pure.

`store_error` decides by the store's own code, not by the class that a client library raises: a full bucket answers 403
at some stores and 507 at others.
"""

from __future__ import annotations

from collections.abc import Iterator

from tentalis.service.exit_codes import ExitCode

PAGE = "docs/how-to/object-storage.md"
_FULL = {
    "InsufficientCapacity",
    "InsufficientStorage",
    "NotEnoughDiskSpace",
    "QuotaExceeded",
    "ServiceQuotaExceeded",
    "StorageQuotaExceeded",
    "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
    "507",
}
_DENIED = {"AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError"}
_SILENT = {
    "ClientConnectorError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "EndpointConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "IncompleteReadError",
    "ProxyConnectionError",
    "ReadTimeoutError",
    "ResponseParserError",
    "RetryError",
    "SSLError",
}
_BUSY = {"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown", "TooManyRequests"}


class StorageError(Exception):
    """The object store did not carry out an operation. `exit_code`: the exit code of a process that needs the store."""

    exit_code = ExitCode.ERROR


class StoreUnreachable(StorageError):
    """The object store does not answer, or is overloaded, after all retries."""

    exit_code = ExitCode.UNREACHABLE


class StoreDenied(StorageError):
    """The object store has no credentials of this process, or denies the operation."""

    exit_code = ExitCode.FORBIDDEN


class StoreFull(StorageError):
    """The bucket is full."""

    exit_code = ExitCode.NEEDS_OPERATOR


class NoSuchBucket(StorageError):
    """The bucket does not exist."""

    exit_code = ExitCode.PERMANENT


class StoredFileMissing(StorageError):
    """A set of files has no manifest, so it does not exist, or lacks a file that its manifest names."""


class StoredFileDamaged(StorageError):
    """The content of a file, or of a manifest, does not match its recorded sha256."""


def store_error(error: BaseException, url: str) -> StorageError | None:
    """Returns the error of an operation on `url` in words, None for an error that is not the store's."""
    chain = list(_chain(error))
    codes = {code for each in chain for code in _codes(each)}
    names = {base.__name__ for each in chain for base in type(each).__mro__}
    said = f"{chain[-1]}".strip() or type(chain[-1]).__name__
    if codes & _FULL:
        return StoreFull(
            f"{url} cannot be written: the bucket is full ({said}). Raise its quota or delete what is not needed, then "
            "start the process again: it continues from its last complete step"
        )
    if "NoSuchBucket" in codes:
        return NoSuchBucket(f"{url}: the bucket does not exist. Create it, or name another one ({said})")
    if names & _NO_CREDENTIALS:
        return StoreDenied(f"{url}: no credentials ({said}). Set AWS_PROFILE, or another of the ways in {PAGE}")
    if codes & _DENIED or codes & {"401", "403"} or "PermissionError" in names:
        return StoreDenied(
            f"{url}: the object store denies access ({said}). Check the credentials and the permissions in {PAGE}"
        )
    busy = codes & _BUSY or any(code in ("429", "500", "502", "503", "504") for code in codes)
    if busy or names & _SILENT or "ConnectionError" in names or "TimeoutError" in names:
        return StoreUnreachable(
            f"{url}: the object store does not answer, or is overloaded, after several attempts ({said}). Check its "
            "address (AWS_ENDPOINT_URL_S3) and the network"
        )
    if "FileNotFoundError" in names:
        return StoredFileMissing(f"{url} is missing")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        # gcsfs gives up an upload that fails. The answer to that is raised in the place of the error.
        cause = cause.__cause__ or (cause.__context__ if type(cause).__name__ == "HttpError" else None)


def _codes(error: BaseException) -> Iterator[str]:
    """Yields the code and the HTTP status of an answer: of botocore's errors, and of gcsfs's."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    code = getattr(error, "code", None)
    if isinstance(code, int | str):
        yield str(code)
    if type(error) is OSError and f"{error}".startswith("Forbidden: "):  # that of gcsfs has no code
        yield "403"
