"""Variables: what each allows, and that nothing reads one outside the list."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import keyed_partitions, namespace
from tentalis.local import child
from tentalis.service import variables
from tentalis.service.outside_variables import COMPOSE, TESTS
from tentalis.service.variable import BadVariable, Variable
from tentalis.service.variables import LISTED, VARIABLES
from tests.support import ROOT, compose

PRODUCT = [path for folder in ("schemas", "streams", "tentalis", "trainer") for path in (ROOT / folder).rglob("*.py")]
LIST = ROOT / "tentalis" / "service" / "variables.py"
OUTSIDE = ROOT / "tentalis" / "service" / "outside_variables.py"
# The first runs as a file, without the packages; the second is read before everything, below the list.
ALONE = {
    ROOT / "tentalis" / "local" / "child.py": {"TENTALIS_SUPERVISED"},
    ROOT / "schemas" / "keyed_partitions.py": {"TENTALIS_KEYED_PARTITIONS"},
    ROOT / "schemas" / "namespace.py": {"TENTALIS_NAMESPACE"},
}
NAME = re.compile(r"(?:TENTALIS|SCHEMA_REGISTRY)_[A-Z_]*[A-Z](?![A-Z_*])")


@cache
def literals(path: Path) -> frozenset[str]:
    """The texts in a module that name a variable, or may."""
    text = path.read_text(encoding="utf-8")
    if "TENTALIS_" not in text and "SCHEMA_REGISTRY_" not in text:
        return frozenset()
    nodes = ast.walk(ast.parse(text))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_no_variable_is_read_outside_the_list() -> None:
    found = {
        (str(path.relative_to(ROOT)), text)
        for path in PRODUCT
        if path not in (LIST, OUTSIDE)
        for text in literals(path)
        if NAME.fullmatch(text) and text not in ALONE.get(path, ())
    }
    assert found == set(), "take the name from tentalis.service.variables"
    assert variables.SUPERVISED.name == child.MARK and variables.NAMESPACE.name == namespace.VARIABLE
    assert variables.KEYED_PARTITIONS.name == keyed_partitions.VARIABLE


def test_every_name_in_the_code_is_in_the_list() -> None:
    named = {name for path in PRODUCT if path != OUTSIDE for text in literals(path) for name in NAME.findall(text)}
    assert named - {name.removesuffix("_FILE") for name in variables.NAMES} - variables.NAMES == set()


def test_every_variable_of_a_process_is_read() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in PRODUCT if path != LIST)
    constants = {name: value for name, value in vars(variables).items() if isinstance(value, Variable)}
    # Secrets are read by the name of the secret.
    apart = {"SASL_PASSWORD_FILE", "SSL_KEY_PASSWORD_FILE", "REGISTRY_PASSWORD_FILE"}
    assert {name for name in constants if f"variables.{name}" not in code} == apart


# Names that the tests and pages give as wrong, or as those of somebody else.
STRANGERS = {
    *("BOOTSTRAP_SERVERS", "DEADRUN", "HOEM", "MARKER_TLL", "METRIC_PORT", "SASL_USER"),  # misspelt
    *("METRICS_SERVICE_HOST", "SERVER_PORT"),  # set by Kubernetes
    *("JUDGE_KEY", "TEST_SECRET"),  # a user's own
}
WHOLE_NAME = re.compile(r"(?<![A-Za-z0-9_])TENTALIS_[A-Z_]*[A-Z](?![A-Z_*])")


def tree() -> Iterator[Path]:
    """The files of the checkout: sources, tests, pages, chart, and those of its first folder."""
    folders = ("config", "deploy", "docs", "examples", "extensions", "helm", "tests", ".ci")
    yield from PRODUCT
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in folders:
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        yield from (path for path in files if not {"node_modules", "__pycache__"} & {*path.parts})


def test_every_variable_that_any_file_names_is_listed() -> None:
    listed = {each.name for each in LISTED} | {f"TENTALIS_{name}" for name in STRANGERS}
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in tree()
        for name in WHOLE_NAME.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert len(found) > 500
    unlisted = {(file, name) for file, name in found if name not in listed}
    assert unlisted == set(), "add a constant to tentalis/service/variables.py, or a row to outside_variables.py"
    assert {f"TENTALIS_{name}" for name in STRANGERS} <= {name for _, name in found}, "nobody names this stranger"


def test_no_variable_is_listed_twice() -> None:
    assert len({each.name for each in LISTED}) == len(LISTED)


def test_compose_reads_its_variables_with_their_defaults() -> None:
    read: dict[str, set[str]] = {}
    for name, default in re.findall(r"\$\{(\w+)(?::?-([^}]*)|:\+[^}]*)?\}", compose.text()):
        read.setdefault(name, set()).add("" if default == "/dev/null" else default)
    assert read.keys() == compose.variables_of(compose.text())
    assert read.keys() - variables.NAMES == {each.name for each in COMPOSE}
    for variable in COMPOSE:
        defaults = read[variable.name] - {""}
        if variable.default_text:
            assert all(default in variable.default_text for default in defaults), variable.name
        else:
            assert defaults == {variable.default_shown} - {""}, variable.name


def test_the_tests_read_theirs() -> None:
    here = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(TENTALIS_[A-Z_]+)\"", here))
    assert read - variables.NAMES == {each.name for each in TESTS}


@pytest.mark.parametrize("variable", [*COMPOSE, *TESTS], ids=lambda each: each.name)
def test_each_default_outside_of_processes_is_allowed(variable: Variable[object]) -> None:
    if not variable.default_text and variable.default_shown:
        variable.parse(variable.default_shown)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda each: each.name)
def test_each_default_is_allowed(variable: Variable[object]) -> None:
    assert variable.read({}) == variable.default == variable.read({variable.name: ""})
    if variable.default is not None:
        assert variable.parse(variable.default_shown) == variable.default


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("METRICS_PORT", "99999", "give a whole number from 0 to 65535"),
        ("METRICS_PORT", "-1", "give a whole number from 0 to 65535"),
        ("METRICS_PORT", "http", "give a whole number"),
        ("MARKER_TTL", "abc", "give a number of seconds from 1 to 315,360,000"),
        ("MARKER_TTL", "nan", "give a number of seconds from 1 to 315,360,000"),
        ("MARKER_TTL", "inf", "give a number of seconds from 1 to 315,360,000"),
        ("MARKER_TTL", "1e20", "give a number of seconds from 1 to 315,360,000"),
        ("SESSION_IDLE", "86400", "give a number of seconds from 1 to 86399"),
        ("MAX_OPEN_TASKS", "0", "give a whole number, at least 1"),
        ("MAX_OPEN_BYTES", "1e6", "give a whole number, at least 1"),
        ("DEAD_RUN", "many", "give a whole number, at least 0"),
        ("DEAD_RATIO", "2", "give a number from 0 to 1"),
        ("STATE", "disk", "give memory or rocksdb"),
        ("STATE", "ROCKSDB", "give memory or rocksdb"),
        ("LOG", "loud", "give DEBUG, INFO, WARNING, ERROR or CRITICAL"),
        ("DEBUG", "maybe", "give true or false"),
        ("SERVER", "localhost:8000", "give a URL"),
        ("SERVER", "http://localhost:99999", "give a URL"),
        ("BOOTSTRAP", "kafka:99999", "give host:port"),
        ("BOOTSTRAP", "PLAINTEXT://kafka:9092", "give host:port"),
        ("BOOTSTRAP", "a:1,,b:2", "give host:port"),
        ("BOOTSTRAP", "kafka:", "give host:port"),
        ("SIGNALS", "Tool Error", "give all, none, or names"),
        ("SCORERS", "absent.yaml", "no such file"),
        ("SECURITY_PROTOCOL", "TLS", "give PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL"),
        ("NAMESPACE", "Staging", "give 1 to 60 of a-z"),
        ("REPLICATION_FACTOR", "two", "give a whole number"),
    ],
)
def test_a_bad_value_is_said_with_what_is_allowed(name: str, text: str, said: str) -> None:
    variable = variables.named(f"TENTALIS_{name}")
    with pytest.raises(BadVariable) as caught:
        variable.read({variable.name: text})
    assert str(caught.value).startswith(f"{variable.name}={text}: give ")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["kafka:9092", "localhost", "10.0.0.1:1,b.example.com:65535", "[::1]:9092"])
def test_bootstrap_takes_lists_of_hosts_with_ports(text: str) -> None:
    assert variables.BOOTSTRAP.read({"TENTALIS_BOOTSTRAP": text}) == text


@given(st.sampled_from(VARIABLES), st.text(max_size=30))
def test_any_text_is_a_value_or_refused_in_words(variable: Variable[object], text: str) -> None:
    try:
        variable.read({variable.name: text})
    except BadVariable as error:
        assert variable.name in str(error) and variable.kind.allowed in str(error)
        assert not variable.secret


def test_no_secret_is_in_a_message() -> None:
    assert variables.SASL_PASSWORD.shown("hunter2") == "***"
    assert "hunter2" not in variables.API_KEY.problem("hunter2")
