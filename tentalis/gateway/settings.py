"""What a gateway is told: its backends, its policies and its bounds. From a YAML file, or from options alone."""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from schemas.problems import problems
from schemas.records import LogprobsMode
from tentalis.gateway.spool import MOST_BYTES
from tentalis.yaml_file import BadYaml, read_mapping


class BadGateway(ValueError):
    """The gateway cannot work as it is told to."""


class Swap(StrEnum):
    """How a backend takes new weights: beside the old ones (hot), or refusing calls meanwhile with 503 (hold)."""

    HOT = "hot"
    HOLD = "hold"


class Tokens(StrEnum):
    """Whether a backend gives token ids: asked until it refuses, or known."""

    AUTO = "auto"
    YES = "yes"
    NO = "no"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class BackendSettings(_Strict):
    """An OpenAI-compatible server.

    `url` with or without /v1. `models`: names of base models that it serves; none: asked of it. `server_id`: whose
    acknowledgements tell which adapters it serves; none: it serves no policies. `key_env` or `key_file`: its own API
    key. `logprobs_mode`: whether its log-probs are of the bare model's distribution (raw: vLLM if not told otherwise)
    or of the one that it sampled from (processed). `timeout_s`: from a call to its first byte, and from one byte to the
    next.
    """

    name: Annotated[str, Field(min_length=1)]
    url: str
    models: tuple[str, ...] = ()
    server_id: str | None = None
    key_env: str | None = None
    key_file: Path | None = None
    token_ids: Tokens = Tokens.AUTO
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    swap: Swap = Swap.HOT
    timeout_s: Annotated[float, Field(gt=0)] = 300.0

    @model_validator(mode="after")
    def _sound(self) -> Self:
        url = urlsplit(self.url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"the backend {self.name} needs a url of the form http://host:port")
        if url.username or url.password:
            raise ValueError(f"the url of the backend {self.name} holds a login: use key_env or key_file")
        return self

    @property
    def base_url(self) -> str:
        """Without a trailing /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    def key(self, env: Mapping[str, str] = os.environ) -> SecretStr | None:
        """Its API key. Raises BadGateway where it is named but not there."""
        if self.key_file is not None:
            try:
                return SecretStr(self.key_file.read_text(encoding="utf-8").strip())
            except OSError as error:
                raise BadGateway(f"the key of the backend {self.name}: {self.key_file}: {error.strerror}") from error
        if self.key_env is not None:
            if not env.get(self.key_env):
                raise BadGateway(f"the key of the backend {self.name}: the variable {self.key_env} is not set")
            return SecretStr(env[self.key_env])
        return None


class TrainableSampling(_Strict):
    """What is forced on every call to a policy, whatever the client asks for: a distribution that can be trained on."""

    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0


PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
"""As trainers take them."""


class PolicySettings(_Strict):
    """A policy that is trained.

    `models`: the names by which clients may ask for it besides its own, with * as in file names. `users`, `workers`:
    adapters of their own, by X-User-Id or the key's user and by X-Worker-Id, used once a version of them is served.
    `sampling`: forced on its calls.
    """

    name: PolicyName
    backend: str
    models: tuple[str, ...] = ()
    users: dict[str, PolicyName] = {}
    workers: dict[str, PolicyName] = {}
    sampling: TrainableSampling | None = None

    @property
    def names(self) -> frozenset[str]:
        """The policy and the personal ones."""
        return frozenset({self.name, *self.users.values(), *self.workers.values()})


class GatewaySettings(_Strict):
    """A gateway.

    `turn_type`: of a call whose client does not say: main, side, or guess. `ack_s`: how long the broker may take to
    acknowledge a turn before it is put on disk instead, `spool_bytes`: the most that may wait there. `hold_s`: how long
    a call waits for a backend that swaps its weights. `header_s`, `body_s`, `stall_s`: seconds for the head of a
    request, for its body, and for a client to take what it is sent. `body_bytes`: the longest body. `drain_s`: how long
    what is under way may take after SIGTERM. `bridge`: whether it has one; `bridge_horizon_s`, `bridge_facts`: up to
    what age, and of how many records, it knows where they lie (docs/bridge.md).
    """

    gateway_id: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "gateway"
    backends: Annotated[tuple[BackendSettings, ...], Field(min_length=1)]
    policies: tuple[PolicySettings, ...] = ()
    turn_type: Annotated[str, Field(pattern="^(main|side|guess)$")] = "guess"
    ack_s: Annotated[float, Field(gt=0)] = 2.0
    spool_bytes: Annotated[int, Field(gt=0)] = MOST_BYTES
    hold_s: Annotated[float, Field(ge=0)] = 300.0
    header_s: Annotated[float, Field(gt=0)] = 10.0
    body_s: Annotated[float, Field(gt=0)] = 60.0
    stall_s: Annotated[float, Field(gt=0)] = 60.0
    drain_s: Annotated[int, Field(ge=0)] = 60
    body_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    bridge: bool = True
    bridge_horizon_s: Annotated[float, Field(gt=0)] = 3600.0
    bridge_facts: Annotated[int, Field(gt=0)] = 100_000

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        backends = [backend.name for backend in self.backends]
        if len(set(backends)) != len(backends):
            raise ValueError(f"names of backends must be unique: {', '.join(backends)}")
        by_name = {backend.name: backend for backend in self.backends}
        names = [policy.name for policy in self.policies]
        if len(set(names)) != len(names):
            raise ValueError(f"names of policies must be unique: {', '.join(names)}")
        for policy in self.policies:
            if policy.backend not in by_name:
                raise ValueError(f"the policy {policy.name} names the backend {policy.backend!r}, which is not there")
            if by_name[policy.backend].server_id is None:
                raise ValueError(f"the backend {policy.backend} of the policy {policy.name} needs a server_id")
        return self

    @property
    def personal(self) -> dict[str, frozenset[str]]:
        """By policy that is one's own, whose it is."""
        own = {(name, user) for policy in self.policies for user, name in policy.users.items()}
        shared = {policy.name for policy in self.policies}
        return {name: frozenset(user for each, user in own if each == name) for name, _ in own if name not in shared}

    @classmethod
    def simple(
        cls,
        server: str,
        *,
        server_id: str,
        policy: str | None,
        gateway_id: str,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW,
    ) -> "GatewaySettings":
        """One backend; whatever model a client asks for, it gets the policy. Raises BadGateway."""
        try:
            return cls(
                gateway_id=gateway_id,
                backends=(BackendSettings(name="local", url=server, server_id=server_id, logprobs_mode=logprobs_mode),),
                policies=(PolicySettings(name=policy, backend="local", models=("*",)),) if policy else (),
            )
        except ValidationError as error:
            raise BadGateway(problems(error, "the settings")) from None

    @classmethod
    def from_file(cls, path: Path, **more: Any) -> "GatewaySettings":
        """From a YAML file; what is given besides stands where the file says nothing. Raises BadGateway."""
        try:
            said = read_mapping(path, "backends and policies (docs/gateway.md has an example)")
        except BadYaml as error:
            raise BadGateway(str(error)) from error
        try:
            return cls.model_validate(more | said)
        except ValidationError as error:
            raise BadGateway(f"{path}: {problems(error, 'the file')}") from None
