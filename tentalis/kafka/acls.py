"""The minimal ACLs of each role, derived from the topology.

docs/operations/security.md, `tentalis topics acls` and the check at the start of every process use them. Pure.

`python -m tentalis.kafka.acls FILE` rewrites the table in a Markdown file, between its BEGIN and END comments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from schemas import topics
from tentalis.kafka import topology
from tentalis.kafka.topology import Application

BEGIN, END = "<!-- acls: begin -->", "<!-- acls: end -->"
READERS = f"{topics.PREFIX}-reader"
FOLLOWERS = f"{topics.PREFIX}-follower"
CONSUMERS = f"{topics.PREFIX}-consume"


class Resource(StrEnum):
    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


class Operation(StrEnum):
    """ACL operations, spelled as in Kafka's own tools."""

    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    DELETE = "Delete"
    DESCRIBE = "Describe"
    ALTER = "Alter"
    ALTER_CONFIGS = "AlterConfigs"
    DESCRIBE_CONFIGS = "DescribeConfigs"


IMPLIED = {
    Operation.DESCRIBE: frozenset({Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.ALTER_CONFIGS}),
}
"""Maps an operation to the operations that imply it in Kafka's authorizer."""


@dataclass(frozen=True, slots=True, order=True)
class Grant:
    """One operation on one resource; if `prefixed`, on every resource whose name begins with `name`."""

    resource: Resource
    name: str
    operation: Operation
    prefixed: bool = False

    def covers(self, resource: Resource, name: str, operation: Operation) -> bool:
        """True if it allows this operation on the resource of that name."""
        named = name.startswith(self.name) if self.prefixed else name == self.name
        allowed = operation is self.operation or self.operation in IMPLIED.get(operation, ())
        return named and resource is self.resource and allowed


@dataclass(frozen=True, slots=True)
class Role:
    """The minimal permissions of one kind of process."""

    name: str
    what: str
    grants: tuple[Grant, ...]

    @property
    def principal(self) -> str:
        """The default user of the role."""
        return f"User:{topics.PREFIX}-{self.name}"

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that it names; not those that it may use by a prefix."""
        return tuple(
            dict.fromkeys(each.name for each in self.grants if each.resource is Resource.TOPIC and not each.prefixed)
        )


def _reads(*names: str) -> Iterator[Grant]:
    # Decoding any record may need its writer schema. Readers that join no group still look up its coordinator.
    for name in (*names, topics.SCHEMAS):
        yield Grant(Resource.TOPIC, name, Operation.READ)
    yield Grant(Resource.GROUP, READERS, Operation.DESCRIBE)


def _follows() -> Iterator[Grant]:
    yield Grant(Resource.GROUP, FOLLOWERS, Operation.DESCRIBE)


def _writes(*names: str) -> Iterator[Grant]:
    for name in names:
        yield Grant(Resource.TOPIC, name, Operation.WRITE)


def _looks(names: Iterable[str]) -> Iterator[Grant]:
    # Existence and offsets, but not contents.
    for name in names:
        yield Grant(Resource.TOPIC, name, Operation.DESCRIBE)


def _group(name: str, *, prefixed: bool = False) -> Iterator[Grant]:
    yield Grant(Resource.GROUP, name, Operation.READ, prefixed)


def _application(application: Application) -> Role:
    """The role of an application: it reads and writes its topics, changelogs included.

    It reads the dead-letter topics that it writes, to write no letter twice. A stream application does so for all its
    inputs. It reads the ids of its topics; a stream application also writes those that it has worked with.
    """
    letters = tuple(map(topics.dlq, application.dead_letters))
    inputs = tuple(map(topics.dlq, application.consumes)) if application.stream else ()
    parts: list[Iterable[Grant]] = [
        _reads(*application.consumes, *application.reads, *application.changelogs, *letters, *inputs, topics.TOPIC_IDS),
        _writes(*application.produces, *letters, *application.changelogs),
        _writes(topics.TOPIC_IDS) if application.stream else (),
    ]
    if not application.stream:
        parts.append(_follows())
    if application.group is not None:
        several = application.group_by is not None
        group = f"{application.group}-" if several else application.group
        parts.append(_group(group, prefixed=several))
        if application.transactional:
            parts.append([Grant(Resource.TRANSACTIONAL_ID, group, Operation.WRITE, several)])
    if application.watches_groups:
        watched = {topic for each in topology.pipeline() for topic in each.consumes}
        parts += [_looks(watched - {*application.reads}), _describes_groups()]
    return _role(application.name, f"`tentalis {' '.join(application.command)}`", *parts)


def _role(name: str, what: str, *parts: Iterable[Grant]) -> Role:
    return Role(name, what, tuple(sorted({grant for part in parts for grant in part})))


def _admin() -> Iterator[Grant]:
    for operation in (
        Operation.CREATE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ):
        yield Grant(Resource.TOPIC, topics.PREFIX, operation, prefixed=True)


def _describes_groups() -> Iterator[Grant]:
    yield Grant(Resource.GROUP, topics.PREFIX, Operation.DESCRIBE, prefixed=True)


def _auditor() -> Iterator[Grant]:
    yield Grant(Resource.TOPIC, topics.PREFIX, Operation.READ, prefixed=True)
    yield from _describes_groups()


def roles() -> dict[str, Role]:
    """Every role by name: one per application on the log, and those of the commands of people."""
    commands = (
        _role(
            "forget",
            "`tentalis forget`",
            _auditor(),
            _writes(*topology.personal(), topics.ROLLOUTS),
            [Grant(Resource.TOPIC, topics.PREFIX, Operation.DESCRIBE_CONFIGS, prefixed=True)],
        ),
        _role(
            "operator",
            "`tentalis policy`",
            _reads(*topics.CONTROL, topics.EVALS),
            _follows(),
            _writes(topics.POLICIES),
        ),
        _role("auditor", "`tentalis replay`, `verify`, `consume`, `gateway tail`, `topics list`", _auditor()),
        _role(
            "groups",
            "`tentalis groups reset-offsets`, `skip`, `delete`",
            _auditor(),
            _group(topics.PREFIX, prefixed=True),
            [Grant(Resource.GROUP, topics.PREFIX, Operation.DELETE, prefixed=True)],
            _writes(*{topics.dlq(topic) for each in topology.APPLICATIONS for topic in each.consumes}),
        ),
        _role(
            "admin",
            "`tentalis topics plan`, `diff`, `apply`",
            _admin(),
            # To see which topics were lost.
            _reads(topics.TOPIC_IDS, *(name for each in topology.streams() for name in each.changelogs)),
            _describes_groups(),
            _writes(topics.SCHEMAS, topics.TOPIC_IDS, topics.AUDIT),
        ),
    )
    on_log = (each for each in topology.APPLICATIONS if each.consumes or each.reads or each.produces)
    return {role.name: role for role in (*map(_application, on_log), *commands)}


ROLES = roles()


def roles_with(resource: Resource, name: str, operation: Operation) -> list[str]:
    """The roles that may perform this operation."""
    return [role.name for role in ROLES.values() if any(g.covers(resource, name, operation) for g in role.grants)]


def markdown() -> str:
    """The table as Markdown, for docs/operations/security.md."""
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
    """Replaces the table between the two comments of a Markdown text. Raises ValueError if the comments are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the text lacks the comments {BEGIN} and {END}: add them where the table belongs")
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
