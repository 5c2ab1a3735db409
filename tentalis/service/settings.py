"""Settings that every process needs: where Kafka is, how to connect, where state and downloads are stored."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

from tentalis.service import variables
from tentalis.service.security import BadSecurity, Security, secret_of

__all__ = ["BadSecurity", "DeadLetterThresholds", "NoBroker", "RegistryLogin", "Security", "Settings"]


class DeadLetterThresholds(BaseModel):
    """The limits past which every process stops instead of dead-lettering: more than `run` dead records in a row, or
    more than the share `ratio` of the last `window` records."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: int = variables.DEAD_RUN.default
    ratio: float = variables.DEAD_RATIO.default
    window: int = variables.DEAD_WINDOW.default

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "DeadLetterThresholds":
        """Reads the variables of an environment. Raises BadVariable."""
        return cls(
            run=variables.DEAD_RUN.read(env),
            ratio=variables.DEAD_RATIO.read(env),
            window=variables.DEAD_WINDOW.read(env),
        )


class RegistryLogin(BaseModel):
    """Login to the schema registry (HTTP basic), and the CA file for https (None: the system's authorities)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    user: str | None = None
    password: SecretStr | None = None
    ca: Path | None = None

    def client_config(self) -> dict[str, str]:
        """Settings of confluent-kafka's registry client. Contains the password: do not log."""
        config = {}
        if self.user is not None and self.password is not None:
            config["basic.auth.user.info"] = f"{self.user}:{self.password.get_secret_value()}"
        if self.ca is not None:
            config["ssl.ca.location"] = str(self.ca)
        return config


class Settings(BaseModel):
    """The settings that every process needs."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    bootstrap: str | None = None
    schema_registry: str | None = None
    registry_login: RegistryLogin = RegistryLogin()
    home: Path = variables.HOME.default
    cache: Path = variables.CACHE.default
    data: Path | None = None
    store: str | None = None
    """Place of the checkpoints and adapters, if it is not `home`."""
    store_cache_bytes: int = variables.STORE_CACHE_BYTES.default
    attachments: str | None = None
    """Place of the files of episodes that are too large for a result; None: they are not kept."""
    attachment_bytes: int = variables.ATTACHMENT_BYTES.default
    security: Security = Security()
    accept_loss: bool = False
    """Continue after a topic was lost, and record what is given up."""
    dead_letters: DeadLetterThresholds = DeadLetterThresholds()

    @model_validator(mode="after")
    def _registry_is_safe(self) -> Self:
        login, url = self.registry_login, urlsplit(self.schema_registry or "")
        if url.username or url.password:
            raise BadSecurity(
                "SCHEMA_REGISTRY_URL contains a user or a password, which would show up in logs: put them into "
                "SCHEMA_REGISTRY_USER and SCHEMA_REGISTRY_PASSWORD_FILE"
            )
        if (login.user is None) != (login.password is None):
            raise BadSecurity("SCHEMA_REGISTRY_USER and SCHEMA_REGISTRY_PASSWORD[_FILE] go together: set both or none")
        if login.password is not None and url.scheme != "https":
            raise BadSecurity(
                "SCHEMA_REGISTRY_PASSWORD is sent in clear text unless SCHEMA_REGISTRY_URL is https://..."
            )
        return self

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        """Reads the variables of an environment. Raises BadVariable, BadSecurity."""
        data = variables.DATA.read(env)
        return cls(
            accept_loss=variables.ACCEPT_LOSS.read(env),
            bootstrap=variables.BOOTSTRAP.read(env),
            schema_registry=variables.REGISTRY_URL.read(env),
            registry_login=RegistryLogin(
                user=variables.REGISTRY_USER.read(env),
                password=secret_of(env, variables.REGISTRY_PASSWORD.name),
                ca=variables.REGISTRY_CA.read(env),
            ),
            home=variables.HOME.read(env).absolute(),
            cache=variables.CACHE.read(env).expanduser().absolute(),
            data=None if data is None else data.absolute(),
            store=variables.STORE.read(env),
            store_cache_bytes=variables.STORE_CACHE_BYTES.read(env),
            attachments=variables.ATTACHMENTS.read(env),
            attachment_bytes=variables.ATTACHMENT_BYTES.read(env),
            security=Security.from_env(env),
            dead_letters=DeadLetterThresholds.from_env(env),
        )

    def require_bootstrap(self) -> str:
        """The bootstrap servers. Raises NoBroker, with the remedy in its message, if none are set."""
        if not self.bootstrap:
            raise NoBroker(
                f"no Kafka is known: none is configured, and no local stack runs in {self.home.absolute()} "
                "(TENTALIS_HOME). Start one with `tentalis up`, or name your Kafka with --bootstrap-server or "
                "TENTALIS_BOOTSTRAP"
            )
        return self.bootstrap

    def require_plaintext(self) -> None:
        """Call it before using the local broker. Raises BadSecurity if the settings ask for TLS or SASL."""
        if self.security.protocol != "PLAINTEXT":
            raise BadSecurity(
                f"TENTALIS_SECURITY_PROTOCOL={self.security.protocol}, but no Kafka is named and the local broker "
                "speaks only PLAINTEXT, on the loopback interface: name your Kafka with --bootstrap-server or "
                "TENTALIS_BOOTSTRAP, or unset TENTALIS_SECURITY_PROTOCOL, TENTALIS_SASL_* and TENTALIS_SSL_*"
            )


class NoBroker(Exception):
    """No bootstrap servers are set and no local stack is running."""
