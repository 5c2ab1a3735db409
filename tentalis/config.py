"""Settings of a process: where Kafka is and how to speak to it, where state and downloads live. Read from TENTALIS_*
variables.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

from tentalis.security import BadSecurity, Security, secret_of

__all__ = ["BadSecurity", "NoBroker", "RegistryLogin", "Security", "Settings"]


class RegistryLogin(BaseModel):
    """How to log in to the schema registry (HTTP basic), and whom to trust on https (None: the system's choice)."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    user: str | None = None
    password: SecretStr | None = None
    ca: Path | None = None

    def client_config(self) -> dict[str, str]:
        """Settings of confluent-kafka's registry client. Holds the password: not for logs."""
        config = {}
        if self.user is not None and self.password is not None:
            config["basic.auth.user.info"] = f"{self.user}:{self.password.get_secret_value()}"
        if self.ca is not None:
            config["ssl.ca.location"] = str(self.ca)
        return config


class Settings(BaseModel):
    """What every process needs to know of its surroundings."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    bootstrap: str | None = None
    schema_registry: str | None = None
    registry_login: RegistryLogin = RegistryLogin()
    home: Path = Path(".tentalis")
    cache: Path = Path("~/.cache/tentalis")
    data: Path | None = None
    security: Security = Security()

    @model_validator(mode="after")
    def _registry_is_safe(self) -> Self:
        login, url = self.registry_login, urlsplit(self.schema_registry or "")
        if url.username or url.password:
            raise BadSecurity(
                "SCHEMA_REGISTRY_URL holds a user or a password, which would show up in logs: put them into "
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
        """TENTALIS_BOOTSTRAP, TENTALIS_HOME, TENTALIS_CACHE, TENTALIS_DATA, TENTALIS_SECURITY_PROTOCOL,
        TENTALIS_SASL_*, TENTALIS_SSL_*, SCHEMA_REGISTRY_URL, SCHEMA_REGISTRY_USER, SCHEMA_REGISTRY_PASSWORD[_FILE] and
        SCHEMA_REGISTRY_CA. Raises BadSecurity, and ValidationError for values of the wrong form."""
        return cls(
            bootstrap=env.get("TENTALIS_BOOTSTRAP") or None,
            schema_registry=env.get("SCHEMA_REGISTRY_URL") or None,
            registry_login=RegistryLogin(
                user=env.get("SCHEMA_REGISTRY_USER") or None,
                password=secret_of(env, "SCHEMA_REGISTRY_PASSWORD"),
                ca=Path(env["SCHEMA_REGISTRY_CA"]) if env.get("SCHEMA_REGISTRY_CA") else None,
            ),
            home=Path(env.get("TENTALIS_HOME") or ".tentalis").absolute(),
            cache=Path(env.get("TENTALIS_CACHE") or "~/.cache/tentalis").expanduser().absolute(),
            data=Path(env["TENTALIS_DATA"]).absolute() if env.get("TENTALIS_DATA") else None,
            security=Security.from_env(env),
        )

    def require_bootstrap(self) -> str:
        """The bootstrap servers. Raises NoBroker, in words for a person, if none are set."""
        if not self.bootstrap:
            raise NoBroker(
                "no Kafka is known: start the local stack with `tentalis up`, or name your own with "
                "--bootstrap-server or TENTALIS_BOOTSTRAP"
            )
        return self.bootstrap

    def require_plaintext(self) -> None:
        """For who uses the local broker. Raises BadSecurity if the settings are for a broker that wants more."""
        if self.security.protocol != "PLAINTEXT":
            raise BadSecurity(
                f"TENTALIS_SECURITY_PROTOCOL={self.security.protocol}, but no Kafka is named and the local broker "
                "speaks plain text, on the loopback interface only: name your Kafka with --bootstrap-server or "
                "TENTALIS_BOOTSTRAP, or unset TENTALIS_SECURITY_PROTOCOL, TENTALIS_SASL_* and TENTALIS_SSL_*"
            )


class NoBroker(Exception):
    """No bootstrap servers are set and no local stack runs."""
