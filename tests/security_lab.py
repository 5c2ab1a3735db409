"""An embedded broker that lets in only whom it knows, and only to what ACLs allow: TLS, mTLS, PLAIN and SCRAM."""

from __future__ import annotations

import datetime
import ipaddress
import os
import subprocess
import sys
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

from tentalis.acls import ROLES
from tentalis.admin import bindings, ensure, grant
from tentalis.config import Security, Settings
from tentalis.kafka import client_config
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import LOOPBACK, free_port
from tests.kafka_fixture import eventually

PASSWORD = "correct-horse-7391"
KEY_PASSWORD = "opens-the-key-2846"
BROKER = "broker"


class Authority:
    """A certificate authority in a folder, and what it signs."""

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
        """Certificate and key (PKCS#8) of a name, as files in PEM form."""
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
    """One broker with a listener for each way in. `ports`: TLS, MTLS and SASL (PLAIN and SCRAM-SHA-512)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        taken: list[int] = []
        for _ in range(4):
            taken.append(free_port(avoid=tuple(taken)))
        self.ports = dict(zip(("TLS", "MTLS", "SASL"), taken, strict=False))
        self.broker = EmbeddedBroker(folder / "kafka", self.ports["MTLS"], taken[3], settings=self._lines(taken[3]))
        certificate, key = self.authority.sign(BROKER)
        (folder / "broker.pem").write_bytes(key.read_bytes() + certificate.read_bytes())

    def _lines(self, controller: int) -> dict[str, str]:
        """`server.properties`: the broker itself, and nobody else, is a super user."""
        at = [f"{name}://{LOOPBACK}:{port}" for name, port in self.ports.items()]
        users = {"plain-user": PASSWORD}
        login = "org.apache.kafka.common.security"
        known = " ".join(f'user_{user}="{password}"' for user, password in users.items())
        return {
            "listeners": ",".join([*at, f"CONTROLLER://{LOOPBACK}:{controller}"]),
            "advertised.listeners": ",".join(at),
            "inter.broker.listener.name": "MTLS",
            "listener.security.protocol.map": "TLS:SSL,MTLS:SSL,SASL:SASL_SSL,CONTROLLER:SSL",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.folder / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority.certificate),
            "ssl.client.auth": "none",
            "listener.name.mtls.ssl.client.auth": "required",
            "listener.name.controller.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/,DEFAULT",
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.sasl.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required {known};",
            "listener.name.sasl.scram-sha-512.sasl.jaas.config": f"{login}.scram.ScramLoginModule required;",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{BROKER}",
        }

    def start(self) -> None:
        """Returns when the broker answers its super user."""
        from tentalis.access import connect

        self.broker.start()
        self.admin = AdminClient(client_config(self.super_user()))
        connect(self.super_user(), 60.0)

    def settings(self, listener: str, security: Security) -> Settings:
        return Settings(bootstrap=f"{LOOPBACK}:{self.ports[listener]}", home=self.folder / "home", security=security)

    def super_user(self) -> Settings:
        """As the broker itself: everything is allowed."""
        return self.certified(BROKER)

    def tls(self) -> Settings:
        """Encrypted, and nobody in particular: User:ANONYMOUS."""
        return self.settings("TLS", Security(protocol="SSL", ssl_ca=self.authority.certificate))

    def certified(self, name: str, password: str | None = None) -> Settings:
        """mTLS as `name`, with a key that `password` opens."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        if not certificate.exists():
            self.authority.sign(name, password=password)
        files = {"ssl_ca": self.authority.certificate, "ssl_certificate": certificate, "ssl_key": key}
        return self.settings("MTLS", Security(protocol="SSL", **files, ssl_key_password=password))

    def login(self, user: str, mechanism: str = "SCRAM-SHA-512", password: str = PASSWORD) -> Settings:
        """SASL_SSL."""
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
        """SCRAM users with PASSWORD, usable when this returns."""
        few = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = list(names)
        changes = [UserScramCredentialUpsertion(name, few, PASSWORD.encode()) for name in wanted]
        for future in self.admin.alter_user_scram_credentials(changes).values():
            future.result(30)
        known = lambda: set(self.admin.describe_user_scram_credentials().result(30)) >= set(wanted)  # noqa: E731
        eventually(known, 30)

    def allow(self, principal: str, resource: str, name: str, *operations: str) -> None:
        """ACLs beside those of the roles."""
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
        """Takes away all that a principal may do with a topic."""
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
        """A SCRAM user for each role, with the least ACLs of that role."""
        self.add_users(role.principal.removeprefix("User:") for role in ROLES.values())
        grant(self.super_user(), bindings(ROLES.values(), None))

    def role(self, name: str) -> Settings:
        """The user of a role."""
        return self.login(ROLES[name].principal.removeprefix("User:"))

    def stop(self) -> None:
        self.broker.stop()


@contextmanager
def safe_broker(folder: Path) -> Iterator[SafeBroker]:
    """A broker with the topics and a user for each role, until the block ends."""
    broker = SafeBroker(folder)
    try:
        broker.start()
        ensure(broker.super_user())
        broker.add_roles()
        yield broker
    finally:
        broker.stop()


class Application:
    """`tentalis serve NAME` as a user."""

    def __init__(self, name: str, settings: Settings, folder: Path, *options: str) -> None:
        self.log = folder / f"{name}.log"
        secret = folder / "secret"
        secret.mkdir(exist_ok=True)
        env = os.environ | environment(settings, secret / f"{name}-password") | {"TENTALIS_HOME": str(folder)}
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "tentalis.cli", "serve", name, *options]
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def said(self) -> str:
        """Its log."""
        return self.log.read_text()

    def end(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.process.wait()


def environment(settings: Settings, password_file: Path) -> dict[str, str]:
    """The variables from which a child process makes these settings; the password lies in a file."""
    security = settings.security
    found = {
        "TENTALIS_BOOTSTRAP": settings.require_bootstrap(),
        "TENTALIS_HOME": str(settings.home),
        "TENTALIS_SECURITY_PROTOCOL": security.protocol,
        "TENTALIS_SASL_MECHANISM": security.sasl_mechanism,
        "TENTALIS_SASL_USERNAME": security.sasl_username,
        "TENTALIS_SSL_CA": str(security.ssl_ca),
    }
    if security.sasl_password is not None:
        password_file.write_text(security.sasl_password.get_secret_value() + "\n")
        password_file.chmod(0o600)
        found["TENTALIS_SASL_PASSWORD_FILE"] = str(password_file)
    return {name: value for name, value in found.items() if value}
