"""Security settings: what is refused in which words, how they are mapped, that no secret shows; the table of ACLs."""

import json
from pathlib import Path

import pytest
from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth
from typer.testing import CliRunner

from schemas import topics
from streams.runtime.settings import credentials
from tentalis.cli.main import app
from tentalis.kafka import topology
from tentalis.kafka.acls import ROLES, Operation, Resource, rewritten, roles_with
from tentalis.kafka.topology import topic_table
from tentalis.local.stack import StackOptions, build_stack
from tentalis.local.state import StateDir
from tentalis.service import security
from tentalis.service.settings import BadSecurity, RegistryLogin, Security, Settings
from tentalis.service.variable import BadVariable
from tests.support import ROOT
from tests.support.security_lab import KEY_PASSWORD, PASSWORD, Authority

LOGIN = {
    "TENTALIS_SECURITY_PROTOCOL": "SASL_SSL",
    "TENTALIS_SASL_MECHANISM": "SCRAM-SHA-512",
    "TENTALIS_SASL_USERNAME": "alice",
    "TENTALIS_SASL_PASSWORD": PASSWORD,
}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"TENTALIS_SECURITY_PROTOCOL": "TLS"}, "TENTALIS_SECURITY_PROTOCOL=TLS: give PLAINTEXT, SSL"),
        ({"TENTALIS_SASL_MECHANISM": "GSSAPI"}, "GSSAPI: give PLAIN, SCRAM-SHA-256"),
        ({"TENTALIS_SASL_MECHANISM": ""}, "needs TENTALIS_SASL_MECHANISM: PLAIN"),
        ({"TENTALIS_SASL_USERNAME": ""}, "needs a user: set TENTALIS_SASL_USERNAME"),
        ({"TENTALIS_SASL_PASSWORD": ""}, "has no password: set TENTALIS_SASL_PASSWORD_FILE"),
        ({"TENTALIS_SECURITY_PROTOCOL": ""}, "is set, but TENTALIS_SECURITY_PROTOCOL=PLAINTEXT does not use it"),
        ({"TENTALIS_SECURITY_PROTOCOL": "SSL"}, "set the protocol to SASL_PLAINTEXT or SASL_SSL, or unset"),
        ({"TENTALIS_SASL_USER": "bob"}, "unknown setting TENTALIS_SASL_USER; did you mean TENTALIS_SASL_USERNAME"),
        ({"TENTALIS_SASL_PASSWORD_FILE": "f"}, "are both set: unset one"),
        ({"TENTALIS_SSL_VERIFY_HOSTNAME": "maybe"}, "give true or false"),
        ({"TENTALIS_SSL_CA": "absent.pem"}, "TENTALIS_SSL_CA=absent.pem: no such file"),
        ({"TENTALIS_SSL_KEY": "k.pem"}, "TENTALIS_SSL_KEY is set without TENTALIS_SSL_CERTIFICATE"),
        ({"TENTALIS_SSL_CERTIFICATE": "c.pem"}, "TENTALIS_SSL_CERTIFICATE is set without TENTALIS_SSL_KEY"),
        ({"TENTALIS_SSL_KEY_PASSWORD": "x"}, "is set without TENTALIS_SSL_KEY"),
        ({"SCHEMA_REGISTRY_URL": "https://u:p@registry"}, "put them into SCHEMA_REGISTRY_USER"),
        ({"SCHEMA_REGISTRY_USER": "u"}, "go together"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_words(change: dict[str, str], words: str) -> None:
    with pytest.raises((BadSecurity, BadVariable), match=words) as raised:
        Settings.from_env(LOGIN | change)
    assert PASSWORD not in str(raised.value)


def test_files_are_checked_before_anything_connects(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.sign("alice", password=KEY_PASSWORD)
    _, other_key = authority.sign("bob")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    base = {"TENTALIS_SECURITY_PROTOCOL": "SSL", "TENTALIS_SSL_CERTIFICATE": str(certificate)}
    cases = [
        ({"TENTALIS_SSL_KEY": str(key)}, "is encrypted, and TENTALIS_SSL_KEY_PASSWORD.* is not set"),
        ({"TENTALIS_SSL_KEY": str(key), "TENTALIS_SSL_KEY_PASSWORD": "wrong"}, "does not decrypt it"),
        ({"TENTALIS_SSL_KEY": str(other_key)}, "do not match"),
        ({"TENTALIS_SSL_KEY": str(garbage)}, "cannot be used"),
        ({"TENTALIS_SSL_KEY": str(other_key), "TENTALIS_SSL_CA": str(garbage)}, "contains no certificates"),
        ({"TENTALIS_SSL_KEY": str(tmp_path)}, "cannot be read"),
    ]
    for change, words in cases:
        with pytest.raises(BadSecurity, match=words):
            Settings.from_env(base | change)
    secret = tmp_path / "secret"
    secret.write_text(f"{KEY_PASSWORD}\n")
    good = base | {"TENTALIS_SSL_KEY": str(key), "TENTALIS_SSL_KEY_PASSWORD_FILE": str(secret)}
    assert Settings.from_env(good).security.ssl_key_password is not None
    secret.write_text("")
    with pytest.raises(BadSecurity, match="is empty"):
        Settings.from_env(good)


def test_both_libraries_get_the_same(authority: Authority) -> None:
    certificate, key = authority.sign("alice", password=KEY_PASSWORD)
    env = LOGIN | {
        "TENTALIS_SSL_CA": str(authority.certificate),
        "TENTALIS_SSL_CERTIFICATE": str(certificate),
        "TENTALIS_SSL_KEY": str(key),
        "TENTALIS_SSL_KEY_PASSWORD": KEY_PASSWORD,
    }
    strict = Security.from_env(env)
    assert security.librdkafka(strict) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": PASSWORD,
        "ssl.endpoint.identification.algorithm": "https",
        "ssl.ca.location": str(authority.certificate),
        "ssl.certificate.location": str(certificate),
        "ssl.key.location": str(key),
        "ssl.key.password": KEY_PASSWORD,
    }
    mapped = security.aiokafka(strict)
    context = mapped.pop("ssl_context")
    assert mapped == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
    }
    assert context.check_hostname and context.verify_mode.name == "CERT_REQUIRED"
    lax = Security.from_env(env | {"TENTALIS_SSL_VERIFY_HOSTNAME": "false"})
    assert security.librdkafka(lax)["ssl.endpoint.identification.algorithm"] == "none"
    context = security.aiokafka(lax)["ssl_context"]
    assert not context.check_hostname and context.verify_mode.name == "CERT_REQUIRED", "the authority still counts"
    assert security.librdkafka(Security()) == {"security.protocol": "PLAINTEXT"}


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"])
def test_faust_hands_on_what_is_meant_for_aiokafka(protocol: str) -> None:
    login = {"sasl_mechanism": "SCRAM-SHA-512", "sasl_username": "alice", "sasl_password": PASSWORD}
    given = Security(protocol=protocol, **(login if protocol.startswith("SASL") else {}))
    got, wanted = dict(credentials_to_aiokafka_auth(credentials(given))), security.aiokafka(given)
    got_context, context = got.pop("ssl_context", None), wanted.pop("ssl_context", None)
    assert got == wanted
    assert (got_context is None) == (context is None) == (not given.tls)


def test_no_secret_shows() -> None:
    registry = {"SCHEMA_REGISTRY_URL": "https://registry", "SCHEMA_REGISTRY_USER": "u"}
    settings = Settings.from_env(LOGIN | registry | {"SCHEMA_REGISTRY_PASSWORD": KEY_PASSWORD})
    for shown in (repr(settings), str(settings), settings.model_dump_json(), f"{settings.model_dump()}"):
        assert PASSWORD not in shown and KEY_PASSWORD not in shown
    assert settings.registry_login.client_config()["basic.auth.user.info"] == f"u:{KEY_PASSWORD}"
    assert RegistryLogin().client_config() == {}
    with pytest.raises(ValueError) as raised:
        Security.model_validate({"protocol": PASSWORD, "sasl_password": {"not": PASSWORD}})
    assert PASSWORD not in str(raised.value)


def test_the_supervisor_gets_no_secret_to_write_down(tmp_path: Path) -> None:
    settings = Settings.from_env(LOGIN | {"TENTALIS_BOOTSTRAP": "kafka:9093", "TENTALIS_HOME": str(tmp_path)})
    with StateDir(tmp_path) as state:
        stack = build_stack(StackOptions(state, settings, model=tmp_path, trainer_config=tmp_path / "run.yaml"))
    assert PASSWORD not in repr(stack.specs)
    assert PASSWORD not in repr(stack)


def test_the_local_broker_is_not_taken_for_a_safe_one(tmp_path: Path) -> None:
    env = LOGIN | {"TENTALIS_HOME": str(tmp_path), "TENTALIS_BOOTSTRAP": None}
    # Before a model is fetched: this one cannot be.
    done = CliRunner().invoke(app, ["up", "--policy-model", str(tmp_path / "absent")], env=env)
    assert done.exit_code == 2 and "the local broker speaks only PLAINTEXT" in done.output


def test_the_documentation_has_the_table_of_the_code() -> None:
    text = (ROOT / "docs" / "operations" / "security.md").read_text(encoding="utf-8")
    assert rewritten(text) == text, "run: python -m tentalis.kafka.acls docs/operations/security.md"


def test_the_table_names_topics_that_there_are_and_gives_each_right_to_few() -> None:
    for role in ROLES.values():
        for grant in role.grants:
            if grant.resource is Resource.TOPIC and not grant.prefixed:
                assert grant.name in topic_table().topics, f"{role.name}: {grant}"
    assert roles_with(Resource.TOPIC, topics.ROLLOUTS, Operation.WRITE) == ["join", "forget"]
    assert roles_with(Resource.TOPIC, topics.BATCHES, Operation.WRITE) == ["trainer"]
    assert roles_with(Resource.TOPIC, topics.SCHEMAS, Operation.WRITE) == ["admin"]
    assert "auditor" in roles_with(Resource.TOPIC, topics.SESSIONS, Operation.DESCRIBE), "Read implies Describe"


def test_every_application_may_read_its_inputs_and_one_may_write_the_dead_letters_of_each() -> None:
    for application in topology.streams():
        for topic in application.consumes:
            assert application.name in roles_with(Resource.TOPIC, topic, Operation.READ)
            looks = roles_with(Resource.TOPIC, topics.dlq(topic), Operation.DESCRIBE)
            assert application.name in looks, "it looks for it"
    owners = {topics.TASKS: "scoring", topics.RESULTS: "scoring", topics.FEEDBACK: "hinting", topics.HALVES: "join"}
    owners |= {topics.OUTCOMES: "aggregation", topics.SESSIONS: "sessions"}
    for topic, owner in owners.items():
        assert roles_with(Resource.TOPIC, topics.dlq(topic), Operation.WRITE) == [owner, "groups"]


def test_topics_acls_prints_without_a_broker() -> None:
    arguments = ["topics", "acls", "--role", "worker", "--principal", "User:w1", "-o", "json"]
    rows = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert {row["principal"] for row in rows} == {"User:w1"} and len(rows) == len(ROLES["worker"].grants)
    done = CliRunner().invoke(app, ["topics", "acls", "--role", "nobody"])
    assert done.exit_code == 2 and "there is no role nobody" in done.output
