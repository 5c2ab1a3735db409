"""The one list of the product's applications: their topics, tables, consumer groups, ports and start.

ACLs, changelog topics, lag tables, the local stack, `forget`, `doctor`, the bridge's training status and
`tentalis serve` derive from it. To add a stream application, add an entry to APPLICATIONS and its folder
`streams/apps/NAME`, whose `processor` has `build(settings)`. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from schemas import topics
from schemas.topics import TopicTable

PREFIX = topics.PREFIX
CONTROL_GROUP = f"{PREFIX}-control"
FORGET = "Forget"


class InStack(StrEnum):
    """The condition under which the local stack starts an application."""

    ALWAYS = "always"
    WITH_GATEWAY = "with a gateway"
    WITH_SCENARIO = "with a scenario"
    NEVER = "never"


class GroupBy(StrEnum):
    """The property that selects one of several consumer groups of an application."""

    ENVIRONMENT = "environment"
    POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Application:
    """One application: a kind of process, of which any number may run.

    Attributes:
        name: its name as a role of the ACLs, in the local stack and in the metrics.
        purpose: what it does, in one line.
        command: arguments of `tentalis` that start it.
        stream: it is a stream application: `streams.apps.NAME`, on the runtime of `streams`.
        group: its consumer group; with `group_by`, the beginning of the names of its groups.
        group_by: it has one consumer group per environment or per policy.
        consumes: topics that it reads as a member of the group. Their uncommitted records are its lag.
        reads: topics that it reads outside the group, from any offset.
        produces: topics that it writes, dead letters and changelogs aside.
        tables: its state tables, each with a changelog.
        dead_letters: topics whose unreadable records it writes to their dead-letter topics.
        in_pipeline: its lag is part of the training loop's lag.
        watches_groups: it reports the lag of the pipeline's consumer groups, so it may describe them.
        transactional: it writes in transactions, under its group's name.
        personal: its tables hold records of people, so `tentalis forget` waits until it has dropped them.
        optional: some deployments run without it.
        port: default port of its HTTP server, which also serves health and metrics. None: health and metrics are
            served where `--metrics-port` says.
        in_stack: when the local stack starts it.
        after: processes of the local stack that must be ready before it starts.
        hang_after: it has a heartbeat, which may stop for so many seconds: longer than its longest operation. None: its
            health is checked over HTTP.
        ends: it ends by itself when its work is done.
        scales: several processes of it share its partitions.
    """

    name: str
    purpose: str
    command: tuple[str, ...]
    stream: bool = False
    group: str | None = None
    group_by: GroupBy | None = None
    consumes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    produces: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    dead_letters: tuple[str, ...] = ()
    in_pipeline: bool = True
    watches_groups: bool = False
    transactional: bool = False
    personal: bool = False
    optional: bool = False
    port: int | None = None
    in_stack: InStack = InStack.ALWAYS
    after: tuple[str, ...] = ("topics",)
    hang_after: float | None = None
    ends: bool = False
    scales: bool = False

    @property
    def app_id(self) -> str:
        """The application id, with which the names of its changelogs begin."""
        return f"{PREFIX}-{self.name}"

    @property
    def changelogs(self) -> tuple[str, ...]:
        """The changelog topics of its tables."""
        return tuple(topics.changelog(self.app_id, table) for table in self.tables)

    @property
    def used_topics(self) -> frozenset[str]:
        """The topics that it reads or writes, dead letters and changelogs aside."""
        return frozenset((*self.consumes, *self.reads, *self.produces))

    def consumer_group(self, *, environment: str = "", policy: str = "") -> str:
        """The consumer group, for an environment or a policy where there is one for each.

        Example: the worker's group for the environment chat is `tentalis-worker-chat`.
        """
        values = {None: "", GroupBy.ENVIRONMENT: f"-{environment}", GroupBy.POLICY: f"-{policy}"}
        return f"{self.group}{values[self.group_by]}"

    def has_group(self, group: str) -> bool:
        """True if this consumer group is one of the application's."""
        if self.group_by is None:
            return group == self.group
        return group.startswith(f"{self.group}-")


def stream(
    name: str,
    purpose: str,
    *,
    consumes: tuple[str, ...],
    produces: tuple[str, ...],
    dead_letters: tuple[str, ...],
    table: str = "state",
    personal: bool = False,
    optional: bool = False,
    in_stack: InStack = InStack.ALWAYS,
    reads: tuple[str, ...] = (),
) -> Application:
    """A stream application: `tentalis serve NAME`, whose consumer group is its application id.

    Each may write to the audit topic, for what it gives up with a lost topic.
    """
    return Application(
        name,
        purpose,
        ("serve", name),
        stream=True,
        group=f"{PREFIX}-{name}",
        consumes=consumes,
        reads=reads,
        produces=(*produces, topics.AUDIT),
        tables=(table,),
        dead_letters=dead_letters,
        personal=personal,
        optional=optional,
        in_stack=in_stack,
        scales=True,
    )


APPLICATIONS: tuple[Application, ...] = (
    stream(
        "sessions",
        "Links the turns of conversations.",
        consumes=(topics.SESSIONS,),
        produces=(topics.SESSIONS, topics.TASKS, topics.RESULTS, topics.FEEDBACK),
        dead_letters=(topics.SESSIONS,),
        personal=True,
        in_stack=InStack.WITH_GATEWAY,
    ),
    stream(
        "scoring",
        "Turns results and feedback into scores, and tasks into opens.",
        consumes=(topics.TASKS, topics.RESULTS, topics.FEEDBACK),
        produces=(topics.HALVES,),
        dead_letters=(topics.TASKS, topics.RESULTS),
        table="recent",
    ),
    stream(
        "hinting",
        "Turns feedback into hints, with the teacher's log-probs.",
        consumes=(topics.RESULTS, topics.FEEDBACK),
        produces=(topics.HALVES,),
        dead_letters=(topics.FEEDBACK,),
        table="recent",
    ),
    stream(
        "experience",
        "Extracts one lesson from each session that ends.",
        consumes=(topics.SESSIONS,),
        produces=(topics.HALVES,),
        dead_letters=(),
        personal=True,
        optional=True,
        in_stack=InStack.NEVER,  # it needs a judge, which only its --hinters file names
    ),
    stream(
        "join",
        "Joins halves into rollouts and outcomes.",
        consumes=(topics.HALVES,),
        produces=(topics.HALVES, topics.ROLLOUTS, topics.OUTCOMES),
        dead_letters=(topics.HALVES,),
        personal=True,
        reads=(topics.OUTCOMES,),  # to account for lost topics
    ),
    stream(
        "aggregation",
        "Windowed means per manager and worker.",
        consumes=(topics.OUTCOMES, topics.FEEDBACK),
        produces=(topics.META,),
        dead_letters=(topics.OUTCOMES,),
    ),
    Application(
        "worker",
        "Answers tasks with the newest acknowledged policy.",
        ("worker",),
        group=f"{PREFIX}-worker",
        group_by=GroupBy.ENVIRONMENT,
        consumes=(topics.TASKS,),
        reads=(topics.POLICIES, topics.POLICY_ACKS, topics.SESSIONS),  # sessions: episodes of programs
        produces=(topics.RESULTS, topics.AUDIT),  # audit: tasks that were removed before it read them
        after=("topics", "model"),
        hang_after=180.0,  # waiting for an unreachable broker takes a minute
        scales=True,
    ),
    Application(
        "gateway",
        "Proxies and records the calls of agents, and serves the bridge.",
        ("serve", "gateway"),
        reads=(
            *topics.CONTROL,
            topics.TASKS,
            topics.RESULTS,
            topics.FEEDBACK,
            topics.SESSIONS,
            topics.HALVES,
            topics.OUTCOMES,
        ),
        produces=(topics.SESSIONS, topics.TASKS, topics.RESULTS, topics.FEEDBACK),
        watches_groups=True,
        optional=True,
        port=8200,
        in_stack=InStack.WITH_GATEWAY,
        after=("topics", "model"),
    ),
    Application(
        "manager",
        "Sends tasks, and feedback of simulated users.",
        ("manager",),
        reads=(*topics.CONTROL, topics.TASKS, topics.RESULTS, topics.FEEDBACK, topics.OUTCOMES),
        produces=(topics.TASKS, topics.FEEDBACK),
        optional=True,
        in_stack=InStack.WITH_SCENARIO,
        hang_after=180.0,
        ends=True,
    ),
    Application(
        "policies",
        "Promotes adapters and loads them into the model server.",
        ("serve", "policies"),
        group=CONTROL_GROUP,
        consumes=topics.CONTROL,
        reads=(topics.EVALS, topics.TASKS, topics.ROLLOUTS),
        produces=(topics.POLICIES, topics.POLICY_ACKS, topics.EVALS),
        dead_letters=topics.CONTROL,
        in_pipeline=False,  # the group only finds dead letters; promotions do not wait for it
        after=("topics", "model"),
        hang_after=180.0,
    ),
    Application(
        "trainer",
        "Trains on rollouts and publishes adapters.",
        ("train",),
        group=f"{PREFIX}-trainer",
        group_by=GroupBy.POLICY,
        consumes=(topics.ROLLOUTS,),
        reads=(topics.RUNS, topics.BATCHES, topics.POLICIES, topics.AUDIT),  # audit: moves of the rollouts topic
        produces=(topics.RUNS, topics.BATCHES, topics.POLICIES, topics.AUDIT),
        dead_letters=(topics.ROLLOUTS,),
        transactional=True,
        hang_after=900.0,  # a micro-batch of a large model takes minutes
        ends=True,
    ),
    Application(
        "model",
        "The model server: OpenAI-compatible, with log-probs and hot-swapped adapters.",
        ("serve", "model"),
        port=8000,
        after=(),
    ),
)
"""Every application, in the order in which documentation lists them."""


def named(name: str) -> Application:
    """The application of this name. Raises KeyError if there is none."""
    for application in APPLICATIONS:
        if application.name == name:
            return application
    raise KeyError(f"there is no application {name}; there are {', '.join(each.name for each in APPLICATIONS)}")


def streams() -> list[Application]:
    """The stream applications."""
    return [each for each in APPLICATIONS if each.stream]


def pipeline() -> list[Application]:
    """Returns the applications of the training loop that consume topics, each after those that write its input.

    In a cycle, the first application of the list comes first.
    """
    ordered: list[Application] = []
    left = [each for each in APPLICATIONS if each.consumes and each.in_pipeline]
    while left:
        free = [each for each in left if not any(_feeds(other, each) for other in left)] or left[:1]
        ordered += free
        left = [each for each in left if each not in free]
    return ordered


def _feeds(one: Application, other: Application) -> bool:
    return one != other and not set(one.produces).isdisjoint(other.consumes)


def written_topics(app_id: str) -> tuple[str, ...]:
    """The topics that the application with this id writes; empty for an application that is not of the product."""
    return next((each.produces for each in APPLICATIONS if each.app_id == app_id), ())


def transactional_topics() -> set[str]:
    """The topics that are written in transactions."""
    return {topic for each in APPLICATIONS if each.transactional for topic in each.produces}


def application_of(group: str) -> Application | None:
    """The application of the pipeline that a consumer group belongs to; None for other groups."""
    return next((each for each in pipeline() if each.has_group(group)), None)


def is_ours(group: str) -> bool:
    """True if a consumer group belongs to an application of this namespace."""
    return any(each.group is not None and each.has_group(group) for each in APPLICATIONS)


def personal() -> dict[str, tuple[Application, ...]]:
    """The topics that carry requests to forget, each with the applications that apply them."""
    found = {
        topic.name: tuple(each for each in APPLICATIONS if each.personal and topic.name in each.consumes)
        for topic in topics.table().topics.values()
        if FORGET in topic.records
    }
    return {topic: applications for topic, applications in found.items() if applications}


def most_processes(application: Application) -> int:
    """Returns the number of processes of an application that can have work: one more would have no partition."""
    if not application.scales:
        return 1
    table = topics.table().topics
    return max(table[name].partitions for name in application.consumes)


def topic_table() -> TopicTable:
    """All topics as they should be on the broker: those of schemas/topics.yaml, and the changelogs."""
    return topics.with_changelogs(topics.table(), (name for each in APPLICATIONS for name in each.changelogs))
