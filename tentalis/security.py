"""How to speak to Kafka safely: one set of settings, checked in words for people, and mapped once for librdkafka and
once for aiokafka.

Secrets are held as SecretStr: they appear in no repr, no log and no error. They come from the environment or from
files.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

if TYPE_CHECKING:
    from ssl import SSLContext

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_VARIABLES = {
    "protocol": "TENTALIS_SECURITY_PROTOCOL",
    "sasl_mechanism": "TENTALIS_SASL_MECHANISM",
    "sasl_username": "TENTALIS_SASL_USERNAME",
    "sasl_password": "TENTALIS_SASL_PASSWORD",
    "ssl_ca": "TENTALIS_SSL_CA",
    "ssl_certificate": "TENTALIS_SSL_CERTIFICATE",
    "ssl_key": "TENTALIS_SSL_KEY",
    "ssl_key_password": "TENTALIS_SSL_KEY_PASSWORD",
    "ssl_verify_hostname": "TENTALIS_SSL_VERIFY_HOSTNAME",
}
_SECRETS = ("sasl_password", "ssl_key_password")
_PREFIXES = ("TENTALIS_SECURITY_", "TENTALIS_SASL_", "TENTALIS_SSL_")
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class BadSecurity(Exception):
    """Security settings that cannot work. The message names the variable and says what to do, and holds no secret."""


class Security(BaseModel):
    """TLS and SASL for every client alike.

    `ssl_ca` None means the system's certificate authorities. Raises BadSecurity for values that contradict each other;
    `check_files` looks at the files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    protocol: str = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    ssl_ca: Path | None = None
    ssl_certificate: Path | None = None
    ssl_key: Path | None = None
    ssl_key_password: SecretStr | None = None
    ssl_verify_hostname: bool = True

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Security:
        """TENTALIS_SECURITY_PROTOCOL, TENTALIS_SASL_*, TENTALIS_SSL_*; secrets also from the file that *_FILE names.

        Raises BadSecurity, also for a misspelt variable of these families and for files that cannot be used.
        """
        known = {*_VARIABLES.values(), *(f"{_VARIABLES[name]}_FILE" for name in _SECRETS)}
        for name in env:
            if name.startswith(_PREFIXES) and name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise BadSecurity(f"there is no setting {name}" + (f"; is {close[0]} meant?" if close else ""))
        values: dict[str, Any] = {
            field: env[variable]
            for field, variable in _VARIABLES.items()
            if env.get(variable) and field not in _SECRETS
        }
        for field in _SECRETS:
            if (secret := secret_of(env, _VARIABLES[field])) is not None:
                values[field] = secret
        if "ssl_verify_hostname" in values:
            text = values["ssl_verify_hostname"]
            if text.lower() not in _TRUTH:
                raise BadSecurity(f"TENTALIS_SSL_VERIFY_HOSTNAME={text}: give true or false")
            values["ssl_verify_hostname"] = _TRUTH[text.lower()]
        security = cls(**values)
        security.check_files()
        return security

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def sasl(self) -> bool:
        """Whether a user name and a password are sent."""
        return self.protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @property
    def principal(self) -> str:
        """Whom the broker takes this process for, as far as that can be told from here."""
        if self.sasl:
            return f"User:{self.sasl_username}"
        if self.tls and self.ssl_certificate is not None:
            return f"the owner of {self.ssl_certificate}"
        return "User:ANONYMOUS"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.protocol not in PROTOCOLS:
            raise BadSecurity(
                f"TENTALIS_SECURITY_PROTOCOL={self.protocol} is unknown; use one of {', '.join(PROTOCOLS)}"
            )
        for family, used in (("sasl_", self.sasl), ("ssl_", self.tls)):
            unused = [name for name in _VARIABLES if name.startswith(family) and name in self.model_fields_set]
            if unused and not used:
                better = [p for p in PROTOCOLS if ("SASL" in p if family == "sasl_" else p.endswith("SSL"))]
                raise BadSecurity(
                    f"{_VARIABLES[unused[0]]} is set, but TENTALIS_SECURITY_PROTOCOL={self.protocol} makes no use of "
                    f"it: set the protocol to {' or '.join(better)}, or unset the variable"
                )
        if self.sasl:
            self._check_sasl()
        if (self.ssl_certificate is None) != (self.ssl_key is None):
            there, missing = ("ssl_certificate", "ssl_key") if self.ssl_key is None else ("ssl_key", "ssl_certificate")
            raise BadSecurity(
                f"{_VARIABLES[there]} is set without {_VARIABLES[missing]}: a client certificate needs its key and a "
                "key its certificate (PEM files)"
            )
        if self.ssl_key_password is not None and self.ssl_key is None:
            raise BadSecurity("TENTALIS_SSL_KEY_PASSWORD is set without TENTALIS_SSL_KEY, the key that it opens")
        return self

    def _check_sasl(self) -> None:
        if self.sasl_mechanism is None:
            raise BadSecurity(
                f"TENTALIS_SECURITY_PROTOCOL={self.protocol} needs TENTALIS_SASL_MECHANISM: {', '.join(MECHANISMS)}"
            )
        if self.sasl_mechanism not in MECHANISMS:
            raise BadSecurity(
                f"TENTALIS_SASL_MECHANISM={self.sasl_mechanism} is not supported; use one of {', '.join(MECHANISMS)}"
            )
        if not self.sasl_username:
            raise BadSecurity(f"TENTALIS_SASL_MECHANISM={self.sasl_mechanism} needs a user: set TENTALIS_SASL_USERNAME")
        if self.sasl_password is None:
            raise BadSecurity(
                f"TENTALIS_SASL_USERNAME={self.sasl_username} has no password: set TENTALIS_SASL_PASSWORD_FILE to a "
                "file that holds it, or TENTALIS_SASL_PASSWORD"
            )

    def check_files(self) -> None:
        """Raises BadSecurity unless the authorities, the certificate and its key can be read and belong together."""
        for name in ("ssl_ca", "ssl_certificate", "ssl_key"):
            path: Path | None = getattr(self, name)
            if path is not None:
                _read(_VARIABLES[name], path)
        if self.tls:
            self.ssl_context()

    def ssl_context(self) -> SSLContext:
        """For Python's own TLS. Raises BadSecurity for files that are no certificates, keys or a pair."""
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ssl_ca)
        except ssl.SSLError as error:
            raise BadSecurity(f"TENTALIS_SSL_CA={self.ssl_ca} holds no certificates in PEM form: {error}") from error
        context.check_hostname = self.ssl_verify_hostname
        if self.ssl_certificate is not None:
            # Always given: without one, OpenSSL would ask for the password of an encrypted key on the terminal.
            password = self.ssl_key_password.get_secret_value() if self.ssl_key_password else ""
            try:
                context.load_cert_chain(self.ssl_certificate, self.ssl_key, password)
            except ssl.SSLError as error:
                raise BadSecurity(self._bad_pair(error.reason)) from error
            except ValueError as error:  # an overlong password
                raise BadSecurity(f"TENTALIS_SSL_KEY_PASSWORD cannot be used: {error}") from error
        return context

    def _bad_pair(self, reason: str | None) -> str:
        pair = f"TENTALIS_SSL_CERTIFICATE={self.ssl_certificate} and TENTALIS_SSL_KEY={self.ssl_key}"
        if reason == "KEY_VALUES_MISMATCH":
            return f"{pair} do not belong together: the key is that of another certificate"
        if "ENCRYPTED" in _read(_VARIABLES["ssl_key"], Path(str(self.ssl_key))):
            what = "does not open it" if self.ssl_key_password else "is not set"
            return f"TENTALIS_SSL_KEY={self.ssl_key} is encrypted, and TENTALIS_SSL_KEY_PASSWORD[_FILE] {what}"
        return f"{pair} cannot be used: {reason or 'not in PEM form'}"


def secret_of(env: Mapping[str, str], variable: str) -> SecretStr | None:
    """A secret from a variable, or from the file that `<variable>_FILE` names (its last line break left out).

    Raises BadSecurity if both are set, or the file cannot be read or is empty.
    """
    value, file = env.get(variable), env.get(f"{variable}_FILE")
    if value and file:
        raise BadSecurity(f"{variable} and {variable}_FILE are both set: unset one")
    if file:
        value = _read(f"{variable}_FILE", Path(file)).rstrip("\r\n")
        if not value:
            raise BadSecurity(f"{variable}_FILE={file} is empty: it should hold the secret")
    return SecretStr(value) if value else None


def _read(variable: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BadSecurity(f"{variable}={path}: there is no such file") from error
    except OSError as error:
        raise BadSecurity(f"{variable}={path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadSecurity(f"{variable}={path} is no text file: PEM files and secrets in UTF-8 are read") from error


def librdkafka(security: Security) -> dict[str, Any]:
    """The settings of librdkafka's clients. Holds the secrets: not for logs."""
    config: dict[str, Any] = {"security.protocol": security.protocol}
    if security.sasl and security.sasl_password is not None:
        config |= {
            "sasl.mechanism": security.sasl_mechanism,
            "sasl.username": security.sasl_username,
            "sasl.password": security.sasl_password.get_secret_value(),
        }
    if security.tls:
        config["ssl.endpoint.identification.algorithm"] = "https" if security.ssl_verify_hostname else "none"
        if security.ssl_ca is not None:
            config["ssl.ca.location"] = str(security.ssl_ca)
        if security.ssl_certificate is not None:
            config["ssl.certificate.location"] = str(security.ssl_certificate)
            config["ssl.key.location"] = str(security.ssl_key)
        if security.ssl_key_password is not None:
            config["ssl.key.password"] = security.ssl_key_password.get_secret_value()
    return config


def aiokafka(security: Security) -> dict[str, Any]:
    """The settings of aiokafka's clients. Holds the secrets: not for logs."""
    config: dict[str, Any] = {"security_protocol": security.protocol}
    if security.tls:
        config["ssl_context"] = security.ssl_context()
    if security.sasl and security.sasl_password is not None:
        config |= {
            "sasl_mechanism": security.sasl_mechanism,
            "sasl_plain_username": security.sasl_username,
            "sasl_plain_password": security.sasl_password.get_secret_value(),
        }
    return config
