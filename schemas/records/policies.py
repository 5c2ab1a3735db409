"""Versions of policies: adapters, promotions, assignments, acknowledgements, pins; and the trainer's back-pressure."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from schemas.ids import policy_name
from schemas.records.base import Finite, Float32s, Int, Int32s, Millis, Name, Record, RecordPart


class Canary(RecordPart):
    """A short token sequence (int32[n]) and the trainer's log-probs of it (float32[n], the first is 0). A server that
    loads the adapter computes them too and compares."""

    token_ids: Int32s
    logprobs: Float32s


class PolicyUpdate(Record):
    """A new version of a policy, policy@vN: an immutable adapter, or a whole model (`rank` 0), and how to load and
    check it."""

    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    run_id: Name
    step: Annotated[Int, Field(ge=0)]
    sha256: Name
    location: Name
    base_model: str
    base_sha256: Name
    rank: Annotated[Int, Field(ge=0)]
    canary: Canary

    @property
    def is_whole_model(self) -> bool:
        """True if the location holds a model folder with all weights, not an adapter."""
        return self.rank == 0

    @property
    def name(self) -> str:
        return policy_name(self.policy, self.version)

    @property
    def key(self) -> str:
        return self.name


class Promotion(Record):
    """The version of a policy to serve."""

    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    sha256: Name
    mode: Name
    by: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return policy_name(self.policy, self.version)

    @property
    def key(self) -> str:
        return self.policy


class PolicyAck(Record):
    """A server's acknowledgement: it loaded an adapter and checked its hash and its canary, or failed to."""

    server_id: Name
    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    sha256: Name
    ok: bool
    error: str | None = None
    canary_max_diff: float | None = None
    load_seconds: Finite = 0.0

    @property
    def name(self) -> str:
        return policy_name(self.policy, self.version)

    @property
    def key(self) -> str:
        return f"{self.server_id}/{self.policy}"


class AssignmentScope(StrEnum):
    """The tasks that an assignment applies to: those of one worker, of one environment, or of all (shared)."""

    UNKNOWN = "unknown"
    WORKER = "worker"
    ENVIRONMENT = "environment"
    SHARED = "shared"


class Assignment(Record):
    """The version that answers `percent` of the tasks of the policy `replaces`: at one worker, in one environment, or
    everywhere. It holds until a later record under the same key.

    `subject`: the worker's id or the environment's name, "" for shared. `version` None: the version of `policy` that is
    served. `active` False: the assignment ends.
    """

    scope: AssignmentScope
    subject: str = ""
    replaces: Name
    policy: Name
    version: Annotated[Int, Field(ge=0)] | None = None
    percent: Annotated[Finite, Field(gt=0.0, le=100.0)] = 100.0
    event_time: Millis
    active: bool
    by: str = ""
    reason: str = ""

    @model_validator(mode="after")
    def _check_subject(self) -> "Assignment":
        if self.scope is not AssignmentScope.UNKNOWN and (self.scope is AssignmentScope.SHARED) == bool(self.subject):
            raise ValueError(
                f"an assignment of scope {self.scope.value} {'has no' if self.subject else 'needs a'} subject"
            )
        return self

    @property
    def name(self) -> str:
        """`policy@vN`, or `policy@latest` for the version that is served."""
        return f"{self.policy}@latest" if self.version is None else policy_name(self.policy, self.version)

    @property
    def key(self) -> str:
        return f"assign/{self.scope.value}/{self.subject}/{self.replaces}"


class AssignmentAck(Record):
    """A server's acknowledgement of an assigned version: it loaded the adapter and checked its hash and its canary, or
    failed to. It does not change which version the server serves by promotion."""

    server_id: Name
    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    sha256: Name
    ok: bool
    error: str | None = None
    canary_max_diff: float | None = None
    load_seconds: Finite = 0.0

    @property
    def name(self) -> str:
        return policy_name(self.policy, self.version)

    @property
    def key(self) -> str:
        return f"{self.server_id}/{self.name}/assigned"


class Pin(Record):
    """Protects an adapter and its checkpoint from pruning, until a later record under the same key unpins it."""

    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    pinned: bool
    by: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return policy_name(self.policy, self.version)

    @property
    def key(self) -> str:
        return f"{self.name}/pin"


class BackPressure(Record):
    """The trainer's request for no more rollouts of a policy (`closed`), because it would drop them; or its end.

    It holds until the next one or until `expires_at`, so that a trainer that died does not block the agents.
    """

    policy: Name
    run_id: Name
    event_time: Millis
    closed: bool
    waiting: Annotated[int, Field(ge=0)]
    ahead: Annotated[Int, Field(ge=0)]
    max_staleness: Annotated[Int, Field(ge=0)]
    expires_at: Millis
    reason: str = ""

    @property
    def key(self) -> str:
        return f"{self.policy}/back-pressure"
