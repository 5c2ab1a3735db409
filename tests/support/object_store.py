"""A server of S3 (moto's) in this process, with faults that a real one has: overload, a full bucket, denied access."""

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tentalis.storage import objects

KEYS = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": "us-east-1"}

Answer = tuple[str, str, str]
"""HTTP status, S3's error code, message."""
OVERLOADED: Answer = ("503 Slow Down", "SlowDown", "Please reduce your request rate.")
UNAVAILABLE: Answer = ("503 Service Unavailable", "ServiceUnavailable", "Please try again.")
FULL: Answer = ("507 Insufficient Storage", "XMinioStorageFull", "Storage backend has reached its minimum free drive.")
DENIED: Answer = ("403 Forbidden", "AccessDenied", "Access Denied")


@dataclass
class Fault:
    """An answer in place of the store's, for requests of a method whose path holds a text: after `skip` of them, for
    `times`."""

    answer: Answer
    method: str
    path: str = ""
    times: int = 10_000
    skip: int = 0
    seen: int = 0


@dataclass
class ObjectStore:
    """The server. `faults` are looked at in order; `requests` are what it was asked, as `PUT /bucket/key`."""

    port: int
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda request: None
    """Is called with each request before it is answered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process finds the store. Few attempts, so that a test of faults is short."""
        return KEYS | {"AWS_ENDPOINT_URL_S3": self.url, "AWS_MAX_ATTEMPTS": "2", "AWS_EC2_METADATA_DISABLED": "true"}

    def client(self) -> Any:
        named = {"aws_access_key_id": "a-key", "aws_secret_access_key": "a-secret", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **named)

    def bucket(self) -> str:
        """Makes a bucket and returns its URL."""
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"

    def keys(self, url: str) -> list[str]:
        """The keys below a URL, relative to it, sorted."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        found = self.client().list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/" if prefix else "").get("Contents", [])
        return sorted(entry["Key"].removeprefix(f"{prefix}/") for entry in found)

    def put(self, url: str, data: bytes) -> None:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        self.client().put_object(Bucket=bucket, Key=key, Body=data)

    def get(self, url: str) -> bytes:
        bucket, _, key = url.removeprefix("s3://").partition("/")
        data: bytes = self.client().get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def answer_instead(self, environ: dict[str, Any]) -> Answer | None:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(f"{method} {path}")
        self.before(self.requests[-1])
        for fault in self.faults:
            if fault.method == method and fault.path in path:
                if fault.skip:
                    fault.skip -= 1
                elif fault.seen < fault.times:
                    fault.seen += 1
                    return fault.answer
        return None


class _Silent(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        """Logs nothing: a test has its own record of the requests."""


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Runs the server until the context ends."""
    moto = DomainDispatcherApplication(create_backend_app)
    store = ObjectStore(0)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer = store.answer_instead(environ)
        if answer is None:
            return moto(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, message = answer
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Silent)
    store.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, name="object store", daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def environment_of(store: ObjectStore) -> Iterator[None]:
    """Makes this process use the store."""
    before = {name: os.environ.get(name) for name in store.environment}
    os.environ.update(store.environment)
    objects._file_system.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        objects._file_system.cache_clear()
