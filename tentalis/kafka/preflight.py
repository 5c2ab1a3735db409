"""Checks at process start: a broker accepts the connection, and the ACLs allow what the role needs."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient

from tentalis.kafka import topic_ids
from tentalis.kafka.acls import ROLES, Operation, Resource
from tentalis.kafka.config import client_config
from tentalis.kafka.errors import LASTING, NoSuchTopic, Unreachable, forbidden, unreachable, wants_certificate
from tentalis.kafka.identity import TopicLost
from tentalis.kafka.login_probe import requires_login
from tentalis.kafka.topic_client import TOPIC_PATIENCE_S
from tentalis.kafka.topic_id_log import WAYS_ON, read_topic_ids
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
PROBE_S = 3.0
DIAGNOSE_AFTER_S = 2.0
DIAGNOSE_AGAIN_S = 10.0
WAIT_INTERVAL_S = 1.0
_OTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
SILENT = "the port accepts connections and sends nothing"


class SilentPort(Exception):
    """A port accepts connections, and neither answers nor closes them."""


def connect(settings: Settings, timeout: float = PATIENCE_S) -> AdminClient:
    """Returns an admin client once a broker has answered it, within `timeout` seconds. Logs after DIAGNOSE_AFTER_S
    seconds that it still tries, and why.

    Raises Unreachable; within seconds for errors that retrying cannot fix (a wrong password, an untrusted certificate,
    a port that speaks another protocol).
    """
    attempts = _ConnectionAttempts(settings, timeout)
    while not attempts.answered():
        pass
    return attempts.client


class _ConnectionAttempts:
    """The attempts of a new client to get an answer from a broker, for `timeout` seconds."""

    def __init__(self, settings: Settings, timeout: float) -> None:
        quiet = logging.Logger(
            "tentalis.kafka.preflight.client"
        )  # outside the logger hierarchy: the exceptions below report it
        quiet.addHandler(logging.NullHandler())
        self._settings, self._timeout = settings, timeout
        self._reasons: list[KafkaError] = []
        self.client = AdminClient(client_config(settings) | {"error_cb": self._reasons.append}, logger=quiet)
        self._began = time.monotonic()
        self._diagnosed_at: float | None = None
        self._silent = False

    def answered(self) -> bool:
        """Asks once; False if no broker has answered yet. Raises Unreachable."""
        left = self._began + self._timeout - time.monotonic()
        try:
            self.client.list_topics(timeout=max(0.05, min(0.3, left)))
        except KafkaException as error:
            self.client.poll(0.0)
            self._check(error)
            return False
        return True

    def _check(self, error: KafkaException) -> None:
        """Raises Unreachable if retrying is pointless, or the time is over."""
        # "All brokers are down" does not give the cause.
        said = [r for r in self._reasons if r.code() not in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT)]
        lasting = next((r for r in reversed(said) if r.code() in LASTING or wants_certificate(r.str())), None)
        if lasting is not None:
            if lasting.code() == KafkaError._SSL:
                self._diagnose(said, error)
            raise Unreachable(unreachable(self._settings, lasting.str())) from error
        waited = time.monotonic() - self._began
        over = waited > self._timeout
        first = self._diagnosed_at is None and waited > DIAGNOSE_AFTER_S
        if first or (over and self._is_diagnosis_old()):
            self._diagnose(said, error)
        why = SILENT if self._silent else said[-1].str() if said else ""
        if over:
            raise Unreachable(unreachable(self._settings, why or error.args[0].str(), self._timeout)) from error
        if first:
            left = max(0.0, self._began + self._timeout - time.monotonic())
            text = f" ({why})" if why else ""
            log.info("no Kafka answers on %s yet%s: trying for %.0f s more", self._settings.bootstrap, text, left)

    def _is_diagnosis_old(self) -> bool:
        return self._diagnosed_at is None or time.monotonic() - self._diagnosed_at > DIAGNOSE_AGAIN_S

    def _diagnose(self, said: Sequence[KafkaError], error: KafkaException) -> None:
        """Looks for a problem that retrying cannot solve, which it raises as Unreachable, and for a silent port."""
        self._diagnosed_at, self._silent = time.monotonic(), False
        if said and said[-1].code() == KafkaError._RESOLVE:
            return  # librdkafka names the problem; looking the name up again could take long
        try:
            found = diagnosis(self._settings)
        except SilentPort:
            self._silent = True
        else:
            if found:
                raise Unreachable(found) from error


def diagnosis(settings: Settings) -> str | None:
    """Describes the problem of protocol, TLS or login between here and the first broker; None if there is none, or
    nothing listens there. Raises SilentPort.

    librdkafka does not report why a certificate is untrusted, that a connection was closed because the port requires
    TLS, nor that a port sends nothing.
    """
    security = settings.security
    host, _, port = settings.require_bootstrap().split(",")[0].rpartition(":")
    host, at = host.strip("[]"), f"Kafka on {host}:{port}"
    if security.tls:
        context = security.ssl_context()
    else:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, int(port)), PROBE_S) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=host):
                    speaks_tls = True
            except ssl.SSLCertVerificationError as error:
                return _untrusted(settings, at, error)
            except TimeoutError as error:
                # A broker that does not speak TLS closes the connection.
                raise SilentPort from error
            except OSError:
                speaks_tls = False
    except (OSError, ValueError):
        return None
    protocol = f"TENTALIS_SECURITY_PROTOCOL={security.protocol}"
    if speaks_tls and not security.tls:
        return f"{at} speaks TLS on this port, but {protocol} does not: set it to SSL, or SASL_SSL with a login"
    if security.tls and not speaks_tls:
        return f"{at} does not speak TLS on this port, but {protocol} does: give its TLS port or set another protocol"
    if speaks_tls and not security.sasl:
        return (
            f"{at} accepts the TLS connection and then closes it with {protocol}: it may require a login (SASL_SSL "
            "with TENTALIS_SASL_MECHANISM, _USERNAME, _PASSWORD_FILE), or it is not a Kafka broker"
        )
    return None if speaks_tls or security.sasl else _login_wanted(host, int(port), at, protocol)


def _login_wanted(host: str, port: int, at: str, protocol: str) -> str | None:
    try:
        if not requires_login(host, port):
            return None
    except OSError:
        return None
    return (
        f"{at} requires a login on this port, but {protocol} sends none: set it to SASL_PLAINTEXT, with "
        "TENTALIS_SASL_MECHANISM, TENTALIS_SASL_USERNAME and TENTALIS_SASL_PASSWORD_FILE"
    )


def _untrusted(settings: Settings, at: str, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _OTHER_NAME:
        return (
            f"the certificate of {at} is for another host ({error.verify_message}). Address the brokers by the host "
            "name in their certificate; TENTALIS_SSL_VERIFY_HOSTNAME=false would accept any host with a certificate "
            "of the authority"
        )
    ca = settings.security.ssl_ca
    whom = f"TENTALIS_SSL_CA={ca}" if ca else "the system's CAs (TENTALIS_SSL_CA is not set)"
    return (
        f"the certificate of {at} is not trusted by {whom}: {error.verify_message}. Set TENTALIS_SSL_CA to the PEM "
        "file of the authority that signed it"
    )


class TopicsMissing(Exception):
    """Topics that did not appear in time. The message names them."""


def wait_for_topics(settings: Settings, names: Collection[str], timeout: float) -> None:
    """Returns once a broker has answered and every topic of `names` exists. Retries a broker that cannot be reached.

    Raises Unreachable, TopicsMissing: the last state, `timeout` seconds after the start.
    """
    end = time.monotonic() + timeout
    said = ""
    while True:
        try:
            found = connect(settings, min(PATIENCE_S, max(1.0, end - time.monotonic()))).list_topics(timeout=PATIENCE_S)
            missing = sorted(set(names) - set(found.topics))
            if not missing:
                return
            problem: Exception = TopicsMissing(
                f"the broker has no {', '.join(missing)}: `tentalis topics apply` creates what is missing"
            )
        except (Unreachable, KafkaException) as error:
            problem = error
        if time.monotonic() > end:
            raise problem
        if str(problem) != said:
            said = str(problem)
            log.info("waiting: %s", said)
        time.sleep(WAIT_INTERVAL_S)


def connect_as(settings: Settings, role: str) -> None:
    """Returns once a broker has answered, and has confirmed the role's permissions on its topics. Raises as `connect`
    and `check_role`."""
    check_role(connect(settings), settings, role)


def check_role(client: AdminClient, settings: Settings, role: str) -> None:
    """Checks that the topics of the role exist, and that this principal may do what the role needs on them.

    Groups and transactions are not checked here: a missing ACL shows at their first use. For topics that do not appear
    within TOPIC_PATIENCE_S seconds, raises TopicLost if the record of all topics has one of them, else NoSuchTopic; and
    as `check`.
    """
    wanted: dict[str, list[Operation]] = {}
    for grant in ROLES[role].grants:
        if grant.resource is Resource.TOPIC and not grant.prefixed:
            wanted.setdefault(grant.name, []).append(grant.operation)
    deadline = time.monotonic() + TOPIC_PATIENCE_S
    while missing := check(client, settings, wanted, role):
        if time.monotonic() > deadline:
            recorded = read_topic_ids(settings).all_topics or {}
            if gone := topic_ids.lost(recorded, missing, {}):
                raise TopicLost(f"{'; '.join(map(str, gone.values()))}. {WAYS_ON}")
            raise NoSuchTopic(
                f"Kafka on {settings.bootstrap} has no topic {', '.join(missing)}, which the role {role} needs: "
                "`tentalis topics apply` creates it"
            )
        time.sleep(0.2)


def check(
    client: AdminClient, settings: Settings, wanted: Mapping[str, Sequence[Operation]], role: str | None = None
) -> list[str]:
    """Checks that this principal may perform the `wanted` operations (topic name -> operations).

    Skips brokers that do not report authorized operations. Returns the topics that do not exist.

    Raises Forbidden, which names every missing operation; KafkaException.
    """
    described = client.describe_topics(
        TopicCollection(list(wanted)), include_authorized_operations=True, request_timeout=PATIENCE_S
    )
    lacks: list[tuple[Operation, Resource, str]] = []
    missing: list[str] = []
    for name, future in described.items():
        try:
            allowed = future.result(PATIENCE_S).authorized_operations
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                lacks += [(operation, Resource.TOPIC, name) for operation in wanted[name]]
            elif error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                missing.append(name)
            else:
                raise
            continue
        if allowed is not None:
            lacks += [
                (operation, Resource.TOPIC, name) for operation in wanted[name] if _code(operation) not in allowed
            ]
    if lacks:
        raise forbidden(settings, lacks, role)
    return sorted(missing)


def _code(operation: Operation) -> Any:
    return AclOperation[operation.name]
