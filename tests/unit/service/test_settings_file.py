"""The settings file: what it may hold, what takes precedence over it, and that errors name the place."""

import contextlib
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.service import variables
from tentalis.service.settings_file import (
    KEYS,
    BadSettingsFile,
    applied,
    find,
    parse,
    with_default_profile,
    write,
)
from tentalis.service.variable import BadVariable

YAML = Path("/etc/tentalis.yaml")
TOML = Path("/etc/config.toml")
TWO = """# clusters
profile: staging  # for now
log: info
profiles:
  staging:
    bootstrap: kafka.staging:9092
    ssl_verify_hostname: no
  production:
    bootstrap: kafka:9093
    marker_ttl: 90000
    sasl_password: hunter2
"""


def test_every_setting_has_a_key_and_no_two_share_one() -> None:
    given = [each for each in variables.VARIABLES if not each.internal]
    assert len(KEYS) == len(given) - 2, "the file's path and the profile are not keys"
    assert {*KEYS} & {"profile", "profiles", "config"} == set()


def test_a_profile_is_over_the_common_values_and_both_name_their_origin() -> None:
    file = parse(TWO, YAML)
    assert file.values(None) == {
        "TENTALIS_LOG": ("info", "/etc/tentalis.yaml"),
        "TENTALIS_BOOTSTRAP": ("kafka.staging:9092", "/etc/tentalis.yaml, profile staging"),
        "TENTALIS_SSL_VERIFY_HOSTNAME": ("false", "/etc/tentalis.yaml, profile staging"),
    }
    assert file.values("production")["TENTALIS_MARKER_TTL"][0] == "90000"


def test_toml_holds_the_same() -> None:
    toml = """
profile = "staging"
log = "info"
[profiles.staging]
bootstrap = "kafka.staging:9092"
ssl_verify_hostname = false
[profiles.production]
bootstrap = "kafka:9093"
marker_ttl = 90000
sasl_password = "hunter2"
"""
    ours, theirs = parse(TWO, YAML), parse(toml, TOML)
    assert (ours.common, ours.profiles, ours.default) == (theirs.common, theirs.profiles, theirs.default)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bootstrp: kafka:1", "unknown key bootstrp. Did you mean bootstrap?"),
        ("TENTALIS_BOOTSTRAP: kafka:1", "unknown key TENTALIS_BOOTSTRAP. Did you mean bootstrap?"),
        ("metrics-port: 1", "unknown key metrics-port. Did you mean metrics_port?"),
        ("profiles: {a: {markr_ttl: 1}}", "unknown key profiles.a.markr_ttl. Did you mean marker_ttl?"),
        ("supervised: x", "unknown key supervised"),
        ("marker_ttl: abc", "marker_ttl: abc: give a number of seconds from 1 to 315,360,000"),
        ("bootstrap: [a, b]", "bootstrap: give host:port[,host:port]"),
        ("profile: b\nprofiles: {a: {}}", "there is no profile b in /etc/tentalis.yaml: the profiles are a"),
        ("profile: a", "there is no profile a in /etc/tentalis.yaml: it has no profiles"),
        ("profiles: [a]", "profiles: give a name and the settings of each profile"),
        ("profiles: {a: kafka}", "profiles.a: give settings"),
        ("profiles: {a b: {}}", "a profile's name is letters"),
        ("home: ~nobody-of-this-name/x", "home: ~nobody-of-this-name/x: "),
        ("profile: 3", "profile: give the name of a profile"),
        ("- a", "give settings, such as bootstrap: host:port, not list"),
        ("log: info\nlog: debug", "log: duplicate key"),
        ("a: [", "not YAML"),
    ],
)
def test_errors_name_the_file_the_key_and_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(BadSettingsFile) as error:
        parse(text, YAML)
    assert said in str(error.value) and "/etc/tentalis.yaml" in str(error.value)


@pytest.mark.parametrize(
    "text", ["sasl_password: [hunter2]", "a: [1\nsasl_password: hunter2", "sasl_password: 'hunter2"]
)
def test_a_bad_secret_is_not_shown(text: str) -> None:
    with pytest.raises(BadSettingsFile) as error:
        parse(text, YAML)
    assert "hunter2" not in str(error.value) and "\n" not in str(error.value)


def test_bad_toml_is_named() -> None:
    with pytest.raises(BadSettingsFile, match=r"/etc/config\.toml: not TOML"):
        parse("a = ", TOML)


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ('log: "a\0b"', YAML, "unacceptable character"),
        ("a: " + "[" * 100_000, YAML, r"nested more deeply than 100 levels \(line 1, column 104\)$"),
        ("a: " + "{b: " * 100_000, YAML, r"nested more deeply than 100 levels \(line 1, column 404\)$"),
        ("- " * 100_000, YAML, r"nested more deeply than 100 levels \(line 1, column 201\)$"),
        ("\n".join(" " * i + "a:" for i in range(1000)), YAML, "nested more deeply than 100 levels.*line 101, column"),
        ("a: 2024-13-45", YAML, r"no valid timestamp \(line 1, column 4\)$"),
        ("a: [1, 0x_]", YAML, r"no valid int \(line 1, column 8\)$"),
        ("a: 1" + "0" * 5000, YAML, r"no valid int \(line 1, column 4\)$"),
        ("a: !!timestamp x", YAML, "no valid timestamp"),
        ("a: !!bool x", YAML, "no valid bool"),
        ('a: !!int ""', YAML, "no valid int"),
        ("a: " + "1:" * 200 + "0.5", YAML, "no valid float"),
        ("a: !!set x", YAML, "expected a mapping node, but found scalar"),
        ("!!map [1]", YAML, "expected a mapping node, but found sequence"),
        ("a = " + "[" * 100_000, TOML, r"nested too deeply$"),
        ("a = 1" + "0" * 5000, TOML, "a number of more than 4300 digits$"),
    ],
)
def test_a_text_that_no_parser_takes_is_named_in_one_line(text: str, path: Path, said: str) -> None:
    began = time.process_time()
    with pytest.raises(BadSettingsFile, match=f"^{path}: not (TOML|YAML): .*{said}") as error:
        parse(text, path)
    assert "\n" not in str(error.value) and time.process_time() - began < 0.3


@pytest.mark.parametrize(
    "text", ["log: info # " + "[" * 1000, "log: 'info'\nsasl_password: '" + "[" * 1000 + "'"], ids=["remark", "value"]
)
def test_brackets_in_values_and_remarks_nest_nothing(text: str) -> None:
    assert parse(text, YAML).common["TENTALIS_LOG"] == "info"


def test_an_empty_file_and_an_empty_value_set_nothing() -> None:
    assert parse("", YAML).values(None) == parse("# nothing\nbootstrap:\n", YAML).values(None) == {}


def test_a_path_is_relative_to_the_file_and_may_begin_with_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    found = parse("home: state\nscorers: ~/s.yaml\nssl_ca: /ca.pem", YAML).common
    assert [*found.values()] == ["/etc/state", "/home/ann/s.yaml", "/ca.pem"]


# --- which file, and what takes precedence ---------------------------------------------------------------------------


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    return {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def test_the_named_file_comes_before_that_of_the_folder_and_that_of_the_user(
    env: dict[str, str], tmp_path: Path
) -> None:
    assert find(env) is None
    user = tmp_path / "config" / "tentalis" / "config.toml"
    write(user, "")
    assert find(env) == user
    (tmp_path / "tentalis.yaml").touch()
    assert find(env) == tmp_path / "tentalis.yaml"
    named = tmp_path / "named.yaml"
    with pytest.raises(BadVariable, match="TENTALIS_CONFIG"):
        find(env | {"TENTALIS_CONFIG": str(named)})
    named.touch()
    assert find(env | {"TENTALIS_CONFIG": str(named)}) == named


def test_the_environment_takes_precedence_and_is_as_before_afterwards(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tentalis.yaml").write_text(TWO, encoding="utf-8")
    env |= {"TENTALIS_LOG": "DEBUG", "TENTALIS_BOOTSTRAP": ""}
    before = dict(env)
    with applied(None, env) as settings:
        assert env["TENTALIS_LOG"] == "DEBUG" and env["TENTALIS_BOOTSTRAP"] == "kafka.staging:9092"
        assert env["TENTALIS_PROFILE"] == "staging" and env["TENTALIS_CONFIG"] == str(tmp_path / "tentalis.yaml")
        assert settings.origin("TENTALIS_LOG", env) == "environment"
        assert settings.origin("TENTALIS_BOOTSTRAP", env) == f"{tmp_path}/tentalis.yaml, profile staging"
        assert settings.origin("TENTALIS_STATE", env) == "default"
    assert env == before


def test_the_flag_the_variable_and_the_file_choose_a_profile_in_this_order(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tentalis.yaml").write_text(TWO + "  third: {}\n", encoding="utf-8")
    with applied(None, env) as settings:
        assert settings.profile == "staging"
    env["TENTALIS_PROFILE"] = "production"
    with applied(None, env) as settings:
        assert settings.profile == "production"
    with applied("third", env) as settings:
        assert settings.profile == env["TENTALIS_PROFILE"] == "third"
    with pytest.raises(BadSettingsFile, match=r"no profile stagin .*Did you mean staging\?"), applied("stagin", env):
        pass


def test_a_profile_needs_a_file(env: dict[str, str]) -> None:
    with pytest.raises(BadSettingsFile, match="there is no profile x: there is no settings file"), applied("x", env):
        pass


def test_a_supervised_process_reads_no_file(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tentalis.yaml").write_text("nonsense: 1", encoding="utf-8")
    env |= {"TENTALIS_SUPERVISED": "mark", "TENTALIS_PROFILE": "gone", "TENTALIS_CONFIG": "/gone"}
    with applied(None, env) as settings:
        assert settings.file is None


def test_it_warns_of_readable_secrets_and_of_what_overrides_a_profile_of_the_command_line(
    env: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "tentalis.yaml"
    path.write_text(TWO, encoding="utf-8")
    path.chmod(0o644)
    env["TENTALIS_BOOTSTRAP"] = "other:9092"
    with applied("production", env) as settings:
        override, readable = settings.warnings
    assert override == f"TENTALIS_BOOTSTRAP of the environment takes precedence over {path}, profile production"
    assert "chmod 600" in readable
    path.chmod(0o600)
    with applied(None, env) as settings:
        assert settings.warnings == ()


# --- another default --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (YAML, TWO),
        (YAML, "# none yet\nprofiles: {production: {}}\n"),
        (YAML, "--- # a document\nprofiles: {production: {}}\n"),
        (TOML, 'profile = "a" # now\n[profiles.a]\n[profiles.production]\n'),
        (TOML, "[profiles.production]\n"),
        (TOML, "# first\nlog = 'info'\n\n[profiles.production]\nlog = 'debug'\n"),
    ],
)
def test_a_new_default_leaves_the_rest_as_it_was(path: Path, text: str) -> None:
    changed = with_default_profile(text, path, "production")
    before, after = parse(text, path), parse(changed, path)
    assert (after.default, after.common, after.profiles) == ("production", before.common, before.profiles)
    assert [line for line in changed.splitlines() if "#" in line and "profile" not in line] == [
        line for line in text.splitlines() if "#" in line and "profile" not in line
    ]


def test_a_file_that_cannot_be_changed_is_left_to_its_owner() -> None:
    with pytest.raises(BadSettingsFile):
        with_default_profile("{profiles: {a: {}}}", YAML, "a")


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    for path in (YAML, TOML):
        with contextlib.suppress(BadSettingsFile):
            parse(text, path)


def test_a_written_file_is_its_owners_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tentalis.yaml"
    write(path, "a")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    write(path, "b")
    assert path.read_text() == "b" and path.stat().st_mode & 0o777 == 0o640
    assert [*path.parent.iterdir()] == [path]
