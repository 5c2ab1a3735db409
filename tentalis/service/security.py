"""Security settings for Kafka: one set, validated with readable errors, and mapped to librdkafka and to aiokafka.

Secrets are SecretStr: they appear in no repr, no log and no error. They come from the environment or from files.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, SecretStr, model_validator

from tentalis.service import variables
from tentalis.service.variable import Variable
from tentalis.service.variables import MECHANISMS, PROTOCOLS

if TYPE_CHECKING:
    from ssl import SSLContext

_FIELDS: dict[str, Variable[Any]] = {
    "protocol": variables.SECURITY_PROTOCOL,
    "sasl_mechanism": variables.SASL_MECHANISM,
    "sasl_username": variables.SASL_USERNAME,
    "sasl_password": variables.SASL_PASSWORD,
    "ssl_ca": variables.SSL_CA,
    "ssl_certificate": variables.SSL_CERTIFICATE,
    "ssl_key": variables.SSL_KEY,
    "ssl_key_password": variables.SSL_KEY_PASSWORD,
    "ssl_verify_hostname": variables.SSL_VERIFY_HOSTNAME,
}
_VARIABLES = {field: variable.name for field, variable in _FIELDS.items()}
_PREFIXES = tuple(f"{variables.PREFIX}{family}_" for family in ("SECURITY", "SASL", "SSL"))


class BadSecurity(Exception):
    """Security settings that cannot work. The message names the variable and the remedy, and contains no secret."""


class Security(BaseModel):
    """TLS and SASL settings, the same for every client.

    `ssl_ca` None means the system's certificate authorities. Raises BadSecurity for contradictory values; `check_files`
    checks the files.
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
        """Reads TENTALIS_SECURITY_PROTOCOL, TENTALIS_SASL_*, TENTALIS_SSL_*; secrets also from the file in *_FILE.

        Raises BadVariable, and BadSecurity also for a misspelt variable of these families and for unusable files.
        """
        known = [name for name in variables.NAMES if name.startswith(_PREFIXES)]
        for name in env:
            if name.startswith(_PREFIXES) and name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise BadSecurity(f"unknown setting {name}" + (f"; did you mean {close[0]}?" if close else ""))
        values: dict[str, Any] = {}
        for field, variable in _FIELDS.items():
            value = secret_of(env, variable.name) if variable.secret else variable.read(env)
            if value is not None and (variable.secret or env.get(variable.name)):
                values[field] = value
        security = cls(**values)
        security.check_files()
        return security

    @property
    def tls(self) -> bool:
        """True if connections are encrypted."""
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def sasl(self) -> bool:
        """True if a user name and a password are sent."""
        return self.protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @property
    def principal(self) -> str:
        """The user as which this process connects to the broker, according to the settings."""
        if self.sasl:
            return f"User:{self.sasl_username}"
        if self.tls and self.ssl_certificate is not None:
            return f"the owner of {self.ssl_certificate}"
        return "User:ANONYMOUS"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.protocol not in PROTOCOLS:
            raise BadSecurity(variables.SECURITY_PROTOCOL.problem(self.protocol))
        for family, used in (("sasl_", self.sasl), ("ssl_", self.tls)):
            unused = [name for name in _VARIABLES if name.startswith(family) and name in self.model_fields_set]
            if unused and not used:
                better = [p for p in PROTOCOLS if ("SASL" in p if family == "sasl_" else p.endswith("SSL"))]
                raise BadSecurity(
                    f"{_VARIABLES[unused[0]]} is set, but TENTALIS_SECURITY_PROTOCOL={self.protocol} does not use it: "
                    f"set the protocol to {' or '.join(better)}, or unset the variable"
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
            raise BadSecurity("TENTALIS_SSL_KEY_PASSWORD is set without TENTALIS_SSL_KEY, the key that it decrypts")
        return self

    def _check_sasl(self) -> None:
        if self.sasl_mechanism is None:
            raise BadSecurity(
                f"TENTALIS_SECURITY_PROTOCOL={self.protocol} needs TENTALIS_SASL_MECHANISM: {', '.join(MECHANISMS)}"
            )
        if self.sasl_mechanism not in MECHANISMS:
            raise BadSecurity(variables.SASL_MECHANISM.problem(self.sasl_mechanism))
        if not self.sasl_username:
            raise BadSecurity(f"TENTALIS_SASL_MECHANISM={self.sasl_mechanism} needs a user: set TENTALIS_SASL_USERNAME")
        if self.sasl_password is None:
            raise BadSecurity(
                f"TENTALIS_SASL_USERNAME={self.sasl_username} has no password: set TENTALIS_SASL_PASSWORD_FILE to a "
                "file that holds it, or TENTALIS_SASL_PASSWORD"
            )

    def check_files(self) -> None:
        """Checks that CA, certificate and key files are readable and match. Raises BadSecurity."""
        for name in ("ssl_ca", "ssl_certificate", "ssl_key"):
            path: Path | None = getattr(self, name)
            if path is not None:
                _read(_VARIABLES[name], path)
        if self.tls:
            self.ssl_context()

    def ssl_context(self) -> SSLContext:
        """The context for Python's own TLS. Raises BadSecurity for files that are not certificates, keys or a pair."""
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ssl_ca)
        except ssl.SSLError as error:
            raise BadSecurity(f"TENTALIS_SSL_CA={self.ssl_ca} contains no certificates in PEM form: {error}") from error
        context.check_hostname = self.ssl_verify_hostname
        if self.ssl_certificate is not None:
            # Always passed: without it, OpenSSL would ask for the password of an encrypted key on the terminal.
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
            return f"{pair} do not match: the key belongs to another certificate"
        if "ENCRYPTED" in _read(_VARIABLES["ssl_key"], Path(str(self.ssl_key))):
            what = "does not decrypt it" if self.ssl_key_password else "is not set"
            return f"TENTALIS_SSL_KEY={self.ssl_key} is encrypted, and TENTALIS_SSL_KEY_PASSWORD[_FILE] {what}"
        return f"{pair} cannot be used: {reason or 'not in PEM form'}"


def secret_of(env: Mapping[str, str], variable: str) -> SecretStr | None:
    """Reads a secret from a variable, or from the file in `<variable>_FILE` (without its trailing line breaks).

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
        raise BadSecurity(f"{variable}={path}: no such file") from error
    except OSError as error:
        raise BadSecurity(f"{variable}={path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadSecurity(f"{variable}={path} is not a text file: give a PEM file, or a secret in UTF-8") from error


def librdkafka(security: Security) -> dict[str, Any]:
    """The settings of librdkafka's clients. Contains secrets: do not log."""
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
    """The settings of aiokafka's clients. Contains secrets: do not log."""
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
