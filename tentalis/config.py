"""Settings of a process: where Kafka is and how to speak to it, where state and downloads live. Read from TENTALIS_*
variables.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, SecretStr


class Security(BaseModel):
    """TLS and SASL for every client alike. Passwords come from the environment or a file, never from argv."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protocol: str = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_ca: Path | None = None
    ssl_certificate: Path | None = None
    ssl_key: Path | None = None


class Settings(BaseModel):
    """What every process needs to know of its surroundings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap: str | None = None
    schema_registry: str | None = None
    home: Path = Path(".tentalis")
    cache: Path = Path("~/.cache/tentalis")
    data: Path | None = None
    security: Security = Security()

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        """TENTALIS_BOOTSTRAP, TENTALIS_HOME, TENTALIS_CACHE, TENTALIS_DATA, TENTALIS_SECURITY_PROTOCOL,
        TENTALIS_SASL_*,
        TENTALIS_SSL_* and SCHEMA_REGISTRY_URL. Raises ValidationError for values of the wrong form."""
        password = env.get("TENTALIS_SASL_PASSWORD")
        if password is None and env.get("TENTALIS_SASL_PASSWORD_FILE"):
            password = Path(env["TENTALIS_SASL_PASSWORD_FILE"]).read_text(encoding="utf-8").strip()
        return cls(
            bootstrap=env.get("TENTALIS_BOOTSTRAP") or None,
            schema_registry=env.get("SCHEMA_REGISTRY_URL") or None,
            home=Path(env.get("TENTALIS_HOME") or ".tentalis").absolute(),
            cache=Path(env.get("TENTALIS_CACHE") or "~/.cache/tentalis").expanduser().absolute(),
            data=Path(env["TENTALIS_DATA"]).absolute() if env.get("TENTALIS_DATA") else None,
            security=Security(
                protocol=env.get("TENTALIS_SECURITY_PROTOCOL", "PLAINTEXT"),
                sasl_mechanism=env.get("TENTALIS_SASL_MECHANISM"),
                sasl_username=env.get("TENTALIS_SASL_USERNAME"),
                sasl_password=SecretStr(password) if password is not None else None,
                ssl_ca=Path(env["TENTALIS_SSL_CA"]) if env.get("TENTALIS_SSL_CA") else None,
                ssl_certificate=Path(env["TENTALIS_SSL_CERTIFICATE"]) if env.get("TENTALIS_SSL_CERTIFICATE") else None,
                ssl_key=Path(env["TENTALIS_SSL_KEY"]) if env.get("TENTALIS_SSL_KEY") else None,
            ),
        )

    def require_bootstrap(self) -> str:
        """The bootstrap servers. Raises NoBroker, in words for a person, if none are set."""
        if not self.bootstrap:
            raise NoBroker(
                "no Kafka is known: start the local stack with `tentalis up`, or name your own with "
                "--bootstrap-server or TENTALIS_BOOTSTRAP"
            )
        return self.bootstrap


class NoBroker(Exception):
    """No bootstrap servers are set and no local stack runs."""
