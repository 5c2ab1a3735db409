"""An embedded broker with authentication (mTLS, PLAIN, SCRAM), TLS and ACLs."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tentalis.kafka.acls import ROLES
from tentalis.kafka.admin import bindings, ensure, grant
from tentalis.kafka.config import client_config
from tentalis.local.ports import LOOPBACK, free_port
from tentalis.service.settings import Security, Settings
from tests.support.fork_server import ForkedProcess
from tests.support.kafka_fixture import eventually, new_broker

PASSWORD = "correct-horse-7391"
KEY_PASSWORD = "opens-the-key-2846"
BROKER = "broker"


class Authority:
    """A certificate authority with its files in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signed = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, 0), True)
        key_usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        signed = signed.add_extension(key_usage, True)
        signed = signed.add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), False)
        self.certificate = folder / f"{name}.pem"
        self.certificate.write_bytes(_pem(signed.sign(self._key, hashes.SHA256())))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - datetime.timedelta(hours=1),
            not_valid_after=now + datetime.timedelta(days=1),
        )

    def sign(self, name: str, *, password: str | None = None, host: str = LOOPBACK) -> tuple[Path, Path]:
        """Creates a certificate and a key (PKCS#8) for a name, as PEM files."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternatives = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = self._builder(subject, key).add_extension(alternatives, False).add_extension(authority, False)
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(_pem(signed.sign(self._key, hashes.SHA256())))
        locked = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
        return paths


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class SafeBroker:
    """A broker with one listener per authentication method. `ports`: TLS, MTLS, SASL (PLAIN and SCRAM-SHA-512)
    and OPEN (PLAIN without TLS)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        taken: list[int] = []
        for _ in range(5):
            taken.append(free_port(avoid=tuple(taken)))
        self.ports = dict(zip(("TLS", "MTLS", "SASL", "OPEN"), taken, strict=False))
        self.broker = new_broker(folder / "kafka", self.ports["MTLS"], taken[4], self._lines(taken[4]))
        certificate, key = self.authority.sign(BROKER)
        (folder / "broker.pem").write_bytes(key.read_bytes() + certificate.read_bytes())

    def _lines(self, controller: int) -> dict[str, str]:
        """The lines of `server.properties`. The broker itself is the only super user."""
        at = [f"{name}://{LOOPBACK}:{port}" for name, port in self.ports.items()]
        users = {"plain-user": PASSWORD}
        login = "org.apache.kafka.common.security"
        known = " ".join(f'user_{user}="{password}"' for user, password in users.items())
        return {
            "listeners": ",".join([*at, f"CONTROLLER://{LOOPBACK}:{controller}"]),
            "advertised.listeners": ",".join(at),
            "inter.broker.listener.name": "MTLS",
            "listener.security.protocol.map": "TLS:SSL,MTLS:SSL,SASL:SASL_SSL,OPEN:SASL_PLAINTEXT,CONTROLLER:SSL",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.folder / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority.certificate),
            "ssl.client.auth": "none",
            "listener.name.mtls.ssl.client.auth": "required",
            "listener.name.controller.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/,DEFAULT",
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.open.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.open.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required {known};",
            "listener.name.sasl.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required {known};",
            "listener.name.sasl.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{BROKER}",
        }

    def start(self) -> None:
        """Starts the broker; returns when it answers its super user."""
        from tentalis.kafka.preflight import connect

        self.broker.start()
        self.admin = AdminClient(client_config(self.super_user()))
        connect(self.super_user(), 60.0)

    def settings(self, listener: str, security: Security) -> Settings:
        return Settings(bootstrap=f"{LOOPBACK}:{self.ports[listener]}", home=self.folder / "home", security=security)

    def super_user(self) -> Settings:
        """Settings for the broker's own user, which may do everything."""
        return self.certified(BROKER)

    def tls(self) -> Settings:
        """Settings for TLS without authentication: User:ANONYMOUS."""
        return self.settings("TLS", Security(protocol="SSL", ssl_ca=self.authority.certificate))

    def certified(self, name: str, password: str | None = None) -> Settings:
        """Settings for mTLS as `name`, with a key encrypted with `password`."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        if not certificate.exists():
            self.authority.sign(name, password=password)
        files = {"ssl_ca": self.authority.certificate, "ssl_certificate": certificate, "ssl_key": key}
        return self.settings("MTLS", Security(protocol="SSL", **files, ssl_key_password=password))

    def login(self, user: str, mechanism: str = "SCRAM-SHA-512", password: str = PASSWORD) -> Settings:
        """Settings for SASL_SSL."""
        return self.settings(
            "SASL",
            Security(
                protocol="SASL_SSL",
                sasl_mechanism=mechanism,
                sasl_username=user,
                sasl_password=password,
                ssl_ca=self.authority.certificate,
            ),
        )

    def add_users(self, names: Iterable[str]) -> None:
        """Adds SCRAM users with PASSWORD; returns when they can log in."""
        few = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = list(names)
        changes = [UserScramCredentialUpsertion(name, few, PASSWORD.encode()) for name in wanted]
        for future in self.admin.alter_user_scram_credentials(changes).values():
            future.result(30)
        known = lambda: set(self.admin.describe_user_scram_credentials().result(30)) >= set(wanted)  # noqa: E731
        eventually(known, 30)

    def allow(self, principal: str, resource: str, name: str, *operations: str) -> None:
        """Adds ACLs beside those of the roles."""
        bindings = [
            AclBinding(
                ResourceType[resource],
                name,
                ResourcePatternType.LITERAL,
                principal,
                "*",
                AclOperation[operation],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]
        for future in self.admin.create_acls(bindings).values():
            future.result(30)

    def revoke(self, principal: str, topic: str) -> None:
        """Deletes all ACLs of a principal on a topic."""
        whose = AclBindingFilter(
            ResourceType.TOPIC,
            topic,
            ResourcePatternType.LITERAL,
            principal,
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        for future in self.admin.delete_acls([whose]).values():
            assert future.result(30)

    def add_roles(self) -> None:
        """Adds a SCRAM user for each role, with the minimal ACLs of that role."""
        self.add_users(role.principal.removeprefix("User:") for role in ROLES.values())
        grant(self.super_user(), bindings(ROLES.values(), None))

    def role(self, name: str) -> Settings:
        """Settings for the user of a role."""
        return self.login(ROLES[name].principal.removeprefix("User:"))

    def stop(self) -> None:
        self.broker.stop()


@contextmanager
def safe_broker(folder: Path) -> Iterator[SafeBroker]:
    """Runs a broker with the topics and a user for each role until the block ends."""
    broker = SafeBroker(folder)
    try:
        broker.start()
        ensure(broker.super_user())
        broker.add_roles()
        yield broker
    finally:
        broker.stop()


class Application:
    """A process of `tentalis serve NAME` with a user's settings."""

    def __init__(self, name: str, settings: Settings, folder: Path, *options: str) -> None:
        self.log = folder / f"{name}.log"
        self.log.unlink(missing_ok=True)
        secret = folder / "secret"
        secret.mkdir(exist_ok=True)
        env = os.environ | environment(settings, secret / f"{name}-password") | {"TENTALIS_HOME": str(folder)}
        self.process = ForkedProcess(["-m", "tentalis.cli", "serve", name, *options], env, self.log)

    def said(self) -> str:
        """The text of its log."""
        return self.log.read_text()

    def end(self) -> None:
        """Kills the process with SIGKILL."""
        self.process.kill()
        self.process.wait()


def environment(settings: Settings, password_file: Path) -> dict[str, str]:
    """The environment variables with which a child process gets these settings; the password is in a file."""
    security = settings.security
    found = {
        "TENTALIS_BOOTSTRAP": settings.require_bootstrap(),
        "TENTALIS_HOME": str(settings.home),
        "TENTALIS_SECURITY_PROTOCOL": security.protocol,
        "TENTALIS_SASL_MECHANISM": security.sasl_mechanism,
        "TENTALIS_SASL_USERNAME": security.sasl_username,
        "TENTALIS_SSL_CA": security.ssl_ca,
        "TENTALIS_SSL_CERTIFICATE": security.ssl_certificate,
        "TENTALIS_SSL_KEY": security.ssl_key,
    }
    if security.sasl_password is not None:
        password_file.write_text(security.sasl_password.get_secret_value() + "\n")
        password_file.chmod(0o600)
        found["TENTALIS_SASL_PASSWORD_FILE"] = str(password_file)
    return {name: str(value) for name, value in found.items() if value}
