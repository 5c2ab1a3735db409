"""A schema registry in this process, over HTTP, with the calls of a Confluent client that register, look up and read
schemas. It enforces BACKWARD_TRANSITIVE with `schemas.wire.compatibility`."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from schemas.wire.compatibility import problem
from tests.support.http_server import serving

SUBJECT = r"/subjects/([^/]+)"


class Refused(Exception):
    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class SchemaRegistry:
    """`failing`: the status of all responses, e.g. 503; `calls`: method and path of each request."""

    url: str = ""
    failing: int | None = None
    calls: list[str] = field(default_factory=list)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, path: str, body: Any) -> Any:
        with self.lock:
            self.calls.append(f"{method} {path}")
            if self.failing is not None:
                raise Refused(self.failing, self.failing * 100 + 1, "told to fail")
            if method == "POST" and (found := re.fullmatch(SUBJECT + "/versions", path)):
                return {"id": self._register(found[1], body["schema"])}
            if method == "POST" and (found := re.fullmatch(SUBJECT, path)):
                schema_id = self._id(body["schema"])
                if schema_id not in self._versions(found[1]):
                    raise Refused(404, 40403, "Schema not found")
                return self._version(found[1], 1 + self.subjects[found[1]].index(schema_id))
            if method == "GET" and (found := re.fullmatch(r"/schemas/ids/(\d+)", path)):
                if not 0 < int(found[1]) <= len(self.texts):
                    raise Refused(404, 40403, "Schema not found")
                return {"schema": self.texts[int(found[1]) - 1]}
            if method == "GET" and (found := re.fullmatch(SUBJECT + "/versions", path)):
                return list(range(1, 1 + len(self._versions(found[1]))))
            if method == "GET" and (found := re.fullmatch(SUBJECT + r"/versions/(\d+)", path)):
                return self._version(found[1], int(found[2]))
            raise Refused(404, 404, "HTTP 404 Not Found")

    def _id(self, text: str) -> int | None:
        return next(
            (number for number, known in enumerate(self.texts, 1) if json.loads(known) == json.loads(text)), None
        )

    def _versions(self, subject: str) -> list[int]:
        if subject not in self.subjects:
            raise Refused(404, 40401, f"Subject '{subject}' not found.")
        return self.subjects[subject]

    def _version(self, subject: str, number: int) -> dict[str, Any]:
        schema_id = self._versions(subject)[number - 1]
        return {"subject": subject, "version": number, "id": schema_id, "schema": self.texts[schema_id - 1]}

    def _register(self, subject: str, text: str) -> int:
        for earlier in self.subjects.get(subject, []):
            if found := problem(text, self.texts[earlier - 1]):
                raise Refused(409, 409, f"Schema being registered is incompatible with an earlier schema: {found}")
        schema_id = self._id(text)
        if schema_id is None:
            self.texts.append(text)
            schema_id = len(self.texts)
        versions = self.subjects.setdefault(subject, [])
        if schema_id not in versions:
            versions.append(schema_id)
        return schema_id


@contextmanager
def schema_registry() -> Iterator[SchemaRegistry]:
    """Serves an empty registry on a free port until the block ends."""
    registry = SchemaRegistry()

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, str, bytes]:
        try:
            status, said = 200, registry.answer(method, path.partition("?")[0], json.loads(body or b"null"))
        except Refused as error:
            status, said = error.status, {"error_code": error.code, "message": str(error)}
        return status, "application/vnd.schemaregistry.v1+json", json.dumps(said).encode()

    with serving(answer) as registry.url:
        yield registry
