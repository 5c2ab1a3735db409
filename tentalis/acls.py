"""The least ACLs of each role, as data: docs/security.md, `tentalis topics acls` and the check at the start of every
process are made from this one table. Pure.

`python -m tentalis.acls FILE` writes the table anew into a Markdown file, between its two marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from schemas import topics

BEGIN, END = "<!-- acls: begin -->", "<!-- acls: end -->"
READERS = "tentalis-reader"
FOLLOWERS = "tentalis-follower"
CONSUMERS = "tentalis-consume"
CONTROL = "tentalis-control"


class Resource(StrEnum):
    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


class Operation(StrEnum):
    """As Kafka's own tools write them."""

    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    DESCRIBE = "Describe"
    ALTER = "Alter"
    ALTER_CONFIGS = "AlterConfigs"
    DESCRIBE_CONFIGS = "DescribeConfigs"


IMPLIED = {
    Operation.DESCRIBE: frozenset({Operation.READ, Operation.WRITE, Operation.ALTER}),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.ALTER_CONFIGS}),
}
"""Operation to those that imply it, in Kafka's authorizer."""


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One operation on one resource; `prefixed`: on all whose names begin so."""

    resource: Resource
    name: str
    operation: Operation
    prefixed: bool = False

    def covers(self, resource: Resource, name: str, operation: Operation) -> bool:
        """Whether it allows this operation on the resource of that name."""
        named = name.startswith(self.name) if self.prefixed else name == self.name
        allowed = operation is self.operation or self.operation in IMPLIED.get(operation, ())
        return named and resource is self.resource and allowed


@dataclass(frozen=True, slots=True)
class Role:
    """What one kind of process may do, and no more."""

    name: str
    what: str
    grants: tuple[Grant, ...]

    @property
    def principal(self) -> str:
        """The user that is meant unless another is named."""
        return f"User:tentalis-{self.name}"


def _reads(*names: str) -> Iterator[Grant]:
    # Any record may need the schema that it was written with. Readers without a group still ask who coordinates it.
    for name in (*names, topics.SCHEMAS):
        yield Grant(Resource.TOPIC, name, Operation.READ)
    yield Grant(Resource.GROUP, READERS, Operation.DESCRIBE)


def _follows() -> Iterator[Grant]:
    yield Grant(Resource.GROUP, FOLLOWERS, Operation.DESCRIBE)


def _writes(*names: str) -> Iterator[Grant]:
    for name in names:
        yield Grant(Resource.TOPIC, name, Operation.WRITE)


def _looks(names: Iterable[str]) -> Iterator[Grant]:
    # That they are there, and how far they go; not what is in them.
    for name in names:
        yield Grant(Resource.TOPIC, name, Operation.DESCRIBE)


def _group(name: str, *, prefixed: bool = False) -> Iterator[Grant]:
    yield Grant(Resource.GROUP, name, Operation.READ, prefixed)


def _application(
    name: str, inputs: Sequence[str], outputs: Sequence[str], *, table: str, owns: Sequence[str] | None = None
) -> Role:
    """A stream application: reads its inputs, writes its outputs, and keeps its changelog. It writes the dead letters
    of the inputs that it `owns`, by default all; whether the other topics of dead letters are there, it looks."""
    app = f"tentalis-{name}"
    changelog = [topics.changelog(app, table)]
    letters = {topics.dlq(topic) for topic in (inputs if owns is None else owns)}
    grants = [
        *_reads(*inputs, *changelog),
        *_writes(*outputs, *letters, *changelog),
        *_looks({*map(topics.dlq, inputs)} - letters),
        *_group(app),
    ]
    return Role(name, f"`tentalis serve {name}`", tuple(sorted(set(grants))))


def _role(name: str, what: str, *parts: Iterable[Grant]) -> Role:
    return Role(name, what, tuple(sorted({grant for part in parts for grant in part})))


def _admin() -> Iterator[Grant]:
    for operation in (
        Operation.CREATE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ):
        yield Grant(Resource.TOPIC, "tentalis", operation, prefixed=True)


def _auditor() -> Iterator[Grant]:
    yield Grant(Resource.TOPIC, "tentalis", Operation.READ, prefixed=True)
    yield Grant(Resource.GROUP, "tentalis", Operation.DESCRIBE, prefixed=True)


ROLES: dict[str, Role] = {
    role.name: role
    for role in (
        _application(
            "sessions",
            (topics.SESSIONS,),
            (topics.SESSIONS, topics.TASKS, topics.RESULTS, topics.FEEDBACK),
            table="state",
        ),
        _application(
            "scoring",
            (topics.TASKS, topics.RESULTS, topics.FEEDBACK),
            (topics.HALVES,),
            table="recent",
            owns=(topics.TASKS, topics.RESULTS),
        ),
        _application(
            "hinting", (topics.RESULTS, topics.FEEDBACK), (topics.HALVES,), table="recent", owns=(topics.FEEDBACK,)
        ),
        _application("experience", (topics.SESSIONS,), (topics.HALVES,), table="state", owns=()),
        _application("join", (topics.HALVES,), (topics.HALVES, topics.ROLLOUTS, topics.OUTCOMES), table="state"),
        _application(
            "aggregation",
            (topics.OUTCOMES, topics.FEEDBACK),
            (topics.META,),
            table="state",
            owns=(topics.OUTCOMES,),
        ),
        _role(
            "worker",
            "`tentalis worker`",
            _reads(topics.TASKS, topics.POLICY_ACKS, topics.POLICIES),
            _follows(),
            _writes(topics.RESULTS),
            _group("tentalis-worker-", prefixed=True),
        ),
        _role(
            "gateway",
            "`tentalis serve gateway`",
            _reads(*topics.CONTROL, topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.SESSIONS, topics.OUTCOMES),
            _looks([topics.HALVES, topics.ROLLOUTS]),
            _follows(),
            [Grant(Resource.GROUP, "tentalis", Operation.DESCRIBE, prefixed=True)],
            _writes(topics.SESSIONS, topics.TASKS, topics.RESULTS, topics.FEEDBACK),
        ),
        _role(
            "manager",
            "`tentalis manager`",
            _reads(
                topics.RUNS,
                topics.POLICIES,
                topics.POLICY_ACKS,
                topics.BATCHES,
                topics.TASKS,
                topics.RESULTS,
                topics.FEEDBACK,
                topics.OUTCOMES,
            ),
            _follows(),
            _writes(topics.TASKS, topics.FEEDBACK),
        ),
        _role(
            "policies",
            "`tentalis serve policies`",
            _reads(*topics.CONTROL, topics.EVALS, topics.TASKS, topics.ROLLOUTS),
            _follows(),
            _writes(topics.POLICIES, topics.POLICY_ACKS, topics.EVALS, *map(topics.dlq, topics.CONTROL)),
            _group(CONTROL),
        ),
        _role(
            "trainer",
            "`tentalis train`",
            _reads(topics.ROLLOUTS, topics.RUNS, topics.BATCHES, topics.POLICIES),
            _follows(),
            _writes(topics.RUNS, topics.BATCHES, topics.POLICIES, topics.dlq(topics.ROLLOUTS)),
            _group("tentalis-trainer-", prefixed=True),
            [Grant(Resource.TRANSACTIONAL_ID, "tentalis-trainer-", Operation.WRITE, prefixed=True)],
        ),
        _role(
            "forget",
            "`tentalis forget`",
            _auditor(),
            _writes(topics.HALVES, topics.SESSIONS, topics.ROLLOUTS),
            [Grant(Resource.TOPIC, "tentalis", Operation.DESCRIBE_CONFIGS, prefixed=True)],
        ),
        _role(
            "operator",
            "`tentalis policy`",
            _reads(*topics.CONTROL, topics.EVALS),
            _follows(),
            _writes(topics.POLICIES),
        ),
        _role("auditor", "`tentalis replay`, `verify`, `consume`, `topics list`", _auditor()),
        _role(
            "admin",
            "`tentalis topics plan`, `diff`, `apply`",
            _admin(),
            _reads(),
            _writes(topics.SCHEMAS),
        ),
    )
}


def roles_with(resource: Resource, name: str, operation: Operation) -> list[str]:
    """The roles that may do this."""
    return [role.name for role in ROLES.values() if any(g.covers(resource, name, operation) for g in role.grants)]


def markdown() -> str:
    """The table as it stands in docs/security.md."""
    lines = ["| role | process | resource | name | operations |", "|---|---|---|---|---|"]
    for role in ROLES.values():
        merged: dict[tuple[Resource, str, bool], list[str]] = {}
        for grant in role.grants:
            merged.setdefault((grant.resource, grant.name, grant.prefixed), []).append(grant.operation.value)
        for number, ((resource, name, prefixed), operations) in enumerate(merged.items()):
            head = (role.name, role.what) if number == 0 else ("", "")
            shown = f"`{name}*`" if prefixed else f"`{name}`"
            lines.append(f"| {head[0]} | {head[1]} | {resource.value} | {shown} | {', '.join(operations)} |")
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """A Markdown text with the table between its marks. Raises ValueError if the marks are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text has no marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
