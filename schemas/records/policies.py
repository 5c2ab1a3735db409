"""Versions of policies: their adapters, promotions, acknowledgements and pins; and the trainer's back-pressure."""

from typing import Annotated

from pydantic import Field

from schemas.ids import policy_name
from schemas.records.base import Finite, Float32s, Int, Int32s, Millis, Name, Record, RecordPart


class Canary(RecordPart):
    """A short token sequence (int32[n]) and the trainer's log-probs of it (float32[n], the first is 0). A server that
    loads the adapter computes them too and compares."""

    token_ids: Int32s
    logprobs: Float32s


class PolicyUpdate(Record):
    """A new version of a policy, policy@vN: an immutable adapter, and how to load and check it."""

    policy: Name
    version: Annotated[Int, Field(ge=0)]
    event_time: Millis
    run_id: Name
    step: Annotated[Int, Field(ge=0)]
    sha256: Name
    location: Name
    base_model: str
    base_sha256: Name
    rank: Annotated[Int, Field(ge=1)]
    canary: Canary

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
