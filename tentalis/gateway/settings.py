"""Gateway settings: backends, policies and limits. From a YAML file, or from options alone."""

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from schemas.bounds import MIN_TEMPERATURE
from schemas.problems import problems
from schemas.records import LogprobsMode
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.recording.spool import MAX_SPOOL_BYTES
from tentalis.text.yaml_file import BadYaml, read_mapping


class BadGateway(ValueError):
    """The gateway's settings are invalid."""


class SwapMode(StrEnum):
    """The way in which a backend loads new weights: beside the old ones (hot), or while answering 503 (hold)."""

    HOT = "hot"
    HOLD = "hold"


class TokenIdSupport(StrEnum):
    """Token id support of a backend: known, or asked for until the backend refuses (auto)."""

    AUTO = "auto"
    YES = "yes"
    NO = "no"


class _StrictModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class BackendSettings(_StrictModel):
    """An OpenAI-compatible server.

    `url`: with or without /v1. `replicas`: further URLs of the same server, with the same models and adapters.
    `models`: names of the base models that it serves; if empty, the gateway asks it. `server_id`: the server id in
    the acknowledgements of its adapters; without one it serves no policies. `key_env` or `key_file`: its own API
    key. `logprobs_mode`: whether its log-probs are of the bare model's distribution (raw: the default of vLLM) or
    of the one that it sampled from (processed), where the gateway cannot measure it. `timeout_s`: from a call to its
    first byte, and from one byte to the next.
    """

    name: Annotated[str, Field(min_length=1)]
    url: str
    replicas: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    server_id: str | None = None
    key_env: str | None = None
    key_file: Path | None = None
    token_ids: TokenIdSupport = TokenIdSupport.AUTO
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    swap: SwapMode = SwapMode.HOT
    timeout_s: Annotated[float, Field(gt=0)] = 300.0

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        for each in (self.url, *self.replicas):
            url = urlsplit(each)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(f"the backend {self.name} needs a url of the form http://host:port")
            if url.username or url.password:
                raise ValueError(f"the url of the backend {self.name} holds credentials: use key_env or key_file")
        if len(set(self.base_urls)) != len(self.base_urls):
            raise ValueError(f"the backend {self.name} has a url twice: {', '.join(self.base_urls)}")
        return self

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The URLs of its replicas without a trailing /v1."""
        return tuple(each.rstrip("/").removesuffix("/v1") for each in (self.url, *self.replicas))

    def key(self, env: Mapping[str, str] = os.environ) -> SecretStr | None:
        """Its API key, None if it has none. Raises BadGateway if the named file or variable cannot be read."""
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


class TrainableSampling(_StrictModel):
    """The sampling forced on every call to a policy, whatever the client asks for, so that it can be trained on."""

    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=2.0)] = 1.0


PolicyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
"""A policy name that trainers accept."""


class FallbackSettings(_StrictModel):
    """A backend that answers if the one before it cannot. `model`: the model that it is asked for; None: the version of
    the policy that it serves, which needs its server_id."""

    backend: str
    model: str | None = None


class PolicySettings(_StrictModel):
    """A trained policy.

    `models`: further names by which clients may ask for it, with * as in file names. `users`, `workers`: personal
    adapters, by X-User-Id or the key's user and by X-Worker-Id, used once a version of them is served. `sampling`:
    forced on its calls. `fallback`: asked in this order if its backend cannot answer.
    """

    name: PolicyName
    backend: str
    models: tuple[str, ...] = ()
    users: dict[str, PolicyName] = {}
    workers: dict[str, PolicyName] = {}
    sampling: TrainableSampling | None = None
    fallback: tuple[FallbackSettings, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of the policy and of its personal policies."""
        return frozenset({self.name, *self.users.values(), *self.workers.values()})


class GatewaySettings(_StrictModel):
    """A gateway.

    `turn_type`: default turn type of a call: main, side, or guess. `ack_s`: longest wait for the broker to acknowledge
    a turn before it goes to disk; `spool_bytes`: size limit of the turns on disk. `hold_s`: longest wait of a call for
    a backend that swaps its weights. `header_s`, `body_s`, `stall_s`: seconds for a request's head, for its body, and
    for a client to read response data. `body_bytes`: size limit of a body. `drain_s`: seconds for running calls after
    SIGTERM. `bridge`: whether to run the bridge; `bridge_horizon_s`, `bridge_facts`: maximum age and number of records
    in its offset index (docs/reference/bridge.md). `limits`: see KeyLimits. `client_templates`: whether a request may
    bring its own chat template (chat_template), a program that the backend runs. `wait_for_versions`: whether it is
    ready only once each policy's backend serves a version of it; until then it answers with the base model.
    """

    gateway_id: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "gateway"
    backends: Annotated[tuple[BackendSettings, ...], Field(min_length=1)]
    policies: tuple[PolicySettings, ...] = ()
    turn_type: Annotated[str, Field(pattern="^(main|side|guess)$")] = "guess"
    ack_s: Annotated[float, Field(gt=0)] = 2.0
    spool_bytes: Annotated[int, Field(gt=0)] = MAX_SPOOL_BYTES
    hold_s: Annotated[float, Field(ge=0)] = 300.0
    header_s: Annotated[float, Field(gt=0)] = 10.0
    body_s: Annotated[float, Field(gt=0)] = 60.0
    stall_s: Annotated[float, Field(gt=0)] = 60.0
    drain_s: Annotated[int, Field(ge=0)] = 60
    body_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    limits: KeyLimits = KeyLimits()
    client_templates: bool = False
    wait_for_versions: bool = False
    bridge: bool = True
    bridge_horizon_s: Annotated[float, Field(gt=0)] = 3600.0
    bridge_facts: Annotated[int, Field(gt=0)] = 100_000

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        backends = [backend.name for backend in self.backends]
        if len(set(backends)) != len(backends):
            raise ValueError(f"backend names must be unique: {', '.join(backends)}")
        by_name = {backend.name: backend for backend in self.backends}
        names = [policy.name for policy in self.policies]
        if len(set(names)) != len(names):
            raise ValueError(f"policy names must be unique: {', '.join(names)}")
        for policy in self.policies:
            if policy.backend not in by_name:
                raise ValueError(f"the policy {policy.name} names the backend {policy.backend!r}, which is undefined")
            if by_name[policy.backend].server_id is None:
                raise ValueError(f"the backend {policy.backend} of the policy {policy.name} needs a server_id")
            for fallback in policy.fallback:
                if fallback.backend not in by_name:
                    raise ValueError(
                        f"a fallback of the policy {policy.name} names the backend {fallback.backend!r}, which is "
                        "undefined"
                    )
                if fallback.model is None and by_name[fallback.backend].server_id is None:
                    raise ValueError(
                        f"the fallback {fallback.backend} of the policy {policy.name} needs a model, or its backend a "
                        "server_id"
                    )
        return self

    @property
    def policy_owners(self) -> dict[str, frozenset[str]]:
        """The users of each personal policy, by its name."""
        owned = {(name, user) for policy in self.policies for user, name in policy.users.items()}
        shared = {policy.name for policy in self.policies}
        return {
            name: frozenset(user for policy_name, user in owned if policy_name == name)
            for name, _ in owned
            if name not in shared
        }

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
        """Settings with one backend; a client gets the policy, whatever model it asks for. `server`: its URL, or those
        of its replicas, separated by commas. Raises BadGateway."""
        url, *replicas = (each.strip() for each in server.split(","))
        try:
            backend = BackendSettings(
                name="local", url=url, replicas=tuple(replicas), server_id=server_id, logprobs_mode=logprobs_mode
            )
            return cls(
                gateway_id=gateway_id,
                backends=(backend,),
                policies=(PolicySettings(name=policy, backend="local", models=("*",)),) if policy else (),
            )
        except ValidationError as error:
            raise BadGateway(problems(error, "the settings")) from None

    @classmethod
    def from_file(cls, path: Path, **more: Any) -> "GatewaySettings":
        """Reads settings from a YAML file. `more`: values for fields that the file leaves out. Raises BadGateway."""
        try:
            values = read_mapping(path, "backends and policies (docs/concepts/gateway.md has an example)")
        except BadYaml as error:
            raise BadGateway(str(error)) from error
        try:
            return cls.model_validate(more | values)
        except ValidationError as error:
            raise BadGateway(f"{path}: {problems(error, 'the file')}") from None
