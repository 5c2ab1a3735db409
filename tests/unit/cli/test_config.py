"""`tentalis config`, the page of all variables, and the check before a process starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tentalis.cli import up
from tentalis.cli.main import app
from tentalis.cli.shared.settings_page import markdown
from tentalis.cli.shared.startup import STARTING
from tentalis.cli.shared.variable_checks import variable_problems
from tentalis.local import stack
from tentalis.local.state import StateDir
from tentalis.service.variables import LISTED, VARIABLES
from tests.support import ROOT

runner = CliRunner()
RUN = "run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\n"
STARTS = {
    "up": ["up"],
    "up detached": ["up", "--detach"],
    "demo": ["demo"],
    "join": ["serve", "join"],
    "model": ["serve", "model"],
    "aggregation": ["serve", "aggregation"],
    "worker": ["worker", "--server", "http://127.0.0.1:1"],
    "manager": ["manager", "--run", "r"],
    "train": ["train", "--config", "absent.yaml"],
}


@pytest.fixture(autouse=True)
def _nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", STARTS.values(), ids=STARTS)
def test_every_command_that_starts_processes_refuses_a_bad_value(command: list[str], tmp_path: Path) -> None:
    done = runner.invoke(app, command, env={"TENTALIS_MARKER_TTL": "abc", "TENTALIS_METRICS_PORT": "99999"})
    assert done.exit_code == 2, done.output
    assert "TENTALIS_MARKER_TTL=abc: give a number of seconds from 1 to 315,360,000" in done.stderr
    assert "TENTALIS_METRICS_PORT=99999: give a whole number from 0 to 65535" in done.stderr
    assert not (tmp_path / "home").exists(), "nothing was started"
    assert command[0] in STARTING


def test_other_commands_and_help_do_not(tmp_path: Path) -> None:
    for command in (["version"], ["status"], ["down"], ["serve", "join", "--help"], ["up", "-h"]):
        done = runner.invoke(app, command, env={"TENTALIS_MARKER_TTL": "abc"})
        assert "TENTALIS_MARKER_TTL=abc" not in done.stderr, command


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TENTALIS_MARKER_TTL": "60"}, "TENTALIS_MARKER_TTL=60: closed tasks must be remembered for more than"),
        ({"TENTALIS_SIGNALS": "sarcasm"}, "TENTALIS_SIGNALS=sarcasm: unknown sarcasm; the signals are"),
        ({"TENTALIS_SCORERS": "FILE"}, "FILE"),
        ({"TENTALIS_HINTERS": "FILE"}, "FILE"),
        ({"TENTALIS_DATA": "nowhere"}, "TENTALIS_DATA=nowhere: no such folder"),
        ({"TENTALIS_KEYS": "nowhere"}, "TENTALIS_KEYS=nowhere: no such file; `tentalis keys create` makes it"),
        ({"TENTALIS_SSL_CA": "ca.pem"}, "TENTALIS_SSL_CA is set, but TENTALIS_SECURITY_PROTOCOL=PLAINTEXT"),
    ],
)
def test_files_limits_and_combinations_are_checked_too(env: dict[str, str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("nonsense: [", encoding="utf-8")
    given = {name: str(file) if value == "FILE" else value for name, value in env.items()}
    (problem,) = variable_problems(given)
    assert said.replace("FILE", str(file)) in problem
    assert problem.startswith(next(iter(env)))


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateDir, "acquire", lambda _: pytest.fail("it goes on to start the stack"))


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize("command", [["up"], ["up", "--dry-run"], ["demo"], ["up", "--config", "good.yaml"]])
def test_a_trainers_variable_is_checked_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(RUN, encoding="utf-8")
    done = runner.invoke(app, command, env={"TRAINING_BATCH_SIZE": "abc"})
    assert done.exit_code == 2 and "TRAINING_BATCH_SIZE (batch_rollouts): " in done.stderr, done.output
    assert not (tmp_path / "home").exists(), "nothing was started"


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize("command", [["up", "--config", "run.yaml"], ["up", "--dry-run", "--config", "run.yaml"]])
def test_a_trainer_configuration_is_checked_before_anything_starts(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{RUN}batch_rolouts: 8\n", encoding="utf-8")
    done = runner.invoke(app, command)
    assert done.exit_code == 2 and "batch_rolouts: no such setting" in done.stderr, done.output
    assert not (tmp_path / "home").exists(), "nothing was started"


def test_a_variable_that_contradicts_the_run_that_continues_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "home" / "runs" / "r" / "standing.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(f"{RUN}batch_rollouts: 8\n", encoding="utf-8")
    monkeypatch.setattr(up, "_standing_run", lambda *_: (tmp_path, config, "chat"))
    monkeypatch.setattr(stack, "build_stack", lambda *_: pytest.fail("it goes on to start the stack"))
    done = runner.invoke(app, ["up"], env={"TRAINING_BATCH_SIZE": "16"})
    assert done.exit_code == 2 and "batch_rollouts and TRAINING_BATCH_SIZE contradict each other" in done.stderr


def test_the_list_names_every_setting_with_value_origin_and_default() -> None:
    env = {"TENTALIS_METRICS_PORT": "9100", "TENTALIS_SASL_PASSWORD": "hunter2"}
    done = runner.invoke(app, ["config", "list", "-o", "json"], env=env)
    assert done.exit_code == 0
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert [*rows] == [each.name for each in LISTED]
    assert all(row["meaning"] and row["used_by"] for row in rows.values())
    assert rows["TENTALIS_HEARTBEAT"]["meaning"].endswith(" Set by a process for its children.")
    assert rows["TENTALIS_RUN"]["used_by"] == "docker-compose.yml" and rows["TENTALIS_RUN"]["value"] == "compose"
    assert rows["TENTALIS_METRICS_PORT"]["value"] == "9100"
    assert rows["TENTALIS_METRICS_PORT"]["origin"] == "environment"
    assert rows["TENTALIS_SASL_PASSWORD"]["value"] == "***" and "hunter2" not in done.output
    assert rows["TENTALIS_MARKER_TTL"] | {"meaning": ""} == {
        "name": "TENTALIS_MARKER_TTL",
        "value": "86400",
        "origin": "default",
        "default": "86400",
        "allowed": "a number of seconds from 1 to 315,360,000",
        "meaning": "",
        "used_by": "`serve join`",
    }
    in_yaml = runner.invoke(app, ["config", "list", "-o", "yaml"], env=env)
    assert yaml.safe_load(in_yaml.stdout) == json.loads(done.stdout)
    table = runner.invoke(app, ["config", "list"], env=env).stdout
    assert table.splitlines()[0].split() == ["NAME", "VALUE", "ORIGIN", "DEFAULT", "MEANING", "USED_BY"]
    assert "hunter2" not in table


def test_a_bad_value_is_listed_and_fails_the_check() -> None:
    env = {"TENTALIS_MARKER_TTL": "abc", "TENTALIS_DEBUG": "maybe", "TENTALIS_LOG": "info"}
    assert runner.invoke(app, ["config", "list"], env=env).exit_code == 0
    done = runner.invoke(app, ["config", "check"], env=env)
    assert done.exit_code == 2 and "TENTALIS_MARKER_TTL=abc" in done.stderr
    assert runner.invoke(app, ["config", "check"]).exit_code == 0


def test_the_page_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == markdown(), "python -m tentalis.cli.shared.settings_page docs/reference/settings.md"


def test_a_bad_flag_is_refused_in_words_too() -> None:
    for arguments, said in (
        (["topics", "list", "--bootstrap-server", "kafka:99999"], "--bootstrap-server kafka:99999: give host:port"),
        (["serve", "join", "--metrics-port", "99999"], "less than or equal to 65535"),
    ):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 2 and said in done.stderr, done.stderr


def test_no_kafka_names_the_home_it_looked_in(tmp_path: Path) -> None:
    done = runner.invoke(app, ["topics", "list"])
    assert done.exit_code == 4
    assert f"no local stack runs in {tmp_path / 'home'} (TENTALIS_HOME)" in done.stderr


# --- the settings file ------------------------------------------------------------------------------------------------

FILE = """profile: staging
state: rocksdb
profiles:
  staging: {bootstrap: "staging:9092"}
  production:
    bootstrap: production:9092
    namespace: prod
    sasl_password: hunter2
"""


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "tentalis.yaml"
    path.write_text(FILE, encoding="utf-8")
    path.chmod(0o600)
    return path


def test_show_says_where_each_value_came_from(settings_file: Path) -> None:
    done = runner.invoke(app, ["config", "show", "-o", "json"], env={"TENTALIS_STATE": "memory"})
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)}
    assert rows["state"] == ("memory", "environment")
    assert rows["bootstrap"] == ("staging:9092", f"{settings_file}, profile staging")
    assert "log" not in rows, "it has no value"
    assert (rows["config"][1], rows["profile"]) == ("found", ("staging", str(settings_file)))
    chosen = runner.invoke(app, ["config", "show", "TENTALIS_PROFILE", "-o", "json", "--profile", "production"])
    assert json.loads(chosen.stdout)[0]["origin"] == "--profile"
    chosen = runner.invoke(
        app, ["config", "show", "TENTALIS_PROFILE", "-o", "json"], env={"TENTALIS_PROFILE": "production"}
    )
    assert json.loads(chosen.stdout)[0]["origin"] == "environment"
    one = runner.invoke(app, ["config", "show", "log", "TENTALIS_STATE", "--profile", "production"])
    assert [line.split()[:3] for line in one.stdout.splitlines()[1:]] == [
        ["log", "WARNING", "for"],
        ["state", "rocksdb", str(settings_file)],
    ]
    assert f"settings file: {settings_file}, profile production" in one.stderr
    of_compose = runner.invoke(app, ["config", "show", "TENTALIS_RUN", "-o", "json"])
    assert json.loads(of_compose.stdout)[0] | {"meaning": ""} == {
        "name": "TENTALIS_RUN",
        "key": None,
        "variable": "TENTALIS_RUN",
        "value": "compose",
        "origin": "default",
        "default": "compose",
        "allowed": "a text",
        "meaning": "",
        "used_by": "docker-compose.yml",
    }
    unknown = runner.invoke(app, ["config", "show", "nonsense"])
    assert unknown.exit_code == 2 and "there is no setting nonsense" in unknown.stderr


@pytest.mark.parametrize(
    "line", ["--profile production config list", "config --profile=production list", "config list --profile production"]
)
def test_a_profile_is_named_anywhere_and_secrets_are_hidden(line: str, settings_file: Path) -> None:
    done = runner.invoke(app, [*line.split(), "-o", "json"])
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["TENTALIS_BOOTSTRAP"]["value"] == "production:9092"
    assert rows["TENTALIS_SASL_PASSWORD"]["value"] == "***" and "hunter2" not in done.output


def test_a_command_without_the_profile_it_was_given_is_refused(settings_file: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["version", "--profile", "prodction"])
    assert done.exit_code == 2 and "there is no profile prodction" in done.stderr
    assert "Did you mean production?" in done.stderr
    for line in ("version --profile=", "--profile= version"):  # a variable of a shell that is empty
        done = runner.invoke(app, line.split())
        assert done.exit_code == 2 and done.stderr == "error: --profile is empty: give the name of a profile\n"
    settings_file.unlink()
    done = runner.invoke(app, ["profile", "list"])
    assert done.exit_code == 2 and "there is no settings file" in done.stderr


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("--profile", "--profile needs the name of a profile, and nothing follows it"),
        ("topics list --profile", "--profile needs the name of a profile, and nothing follows it"),
        ("topics list --profile -- a", "--profile needs the name of a profile, and nothing follows it"),
        ("--profile --nonsense version", "--profile needs the name of a profile, and --nonsense follows it"),
        ("topics list --profile -o json", "--profile needs the name of a profile, and -o follows it"),
        ("version --profile production --profile=staging", "--profile is given more than once"),
    ],
)
def test_a_profile_without_its_name_is_a_usage_error(line: str, wrong: str) -> None:
    done = runner.invoke(app, line.split())
    assert done.exit_code == 2 and done.stderr.endswith(f"\n\nError: {wrong}.\n")


def test_a_key_that_nobody_knows_ends_every_command(settings_file: Path) -> None:
    settings_file.write_text("bootstrap_server: kafka:9092", encoding="utf-8")
    done = runner.invoke(app, ["version"])
    assert done.exit_code == 2 and "unknown key bootstrap_server. Did you mean bootstrap? `tent" in done.stderr


def test_the_check_names_the_file_of_a_bad_value(settings_file: Path) -> None:
    settings_file.write_text("scorers: nowhere.yaml\n", encoding="utf-8")
    done = runner.invoke(app, ["config", "check"])
    assert done.exit_code == 2 and f"(from {settings_file})" in done.stderr
    found = json.loads(runner.invoke(app, ["config", "check", "-o", "json"]).stdout)
    assert [each["origin"] for each in found] == [str(settings_file)]


def test_the_names_of_topics_follow_the_profile(settings_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tentalis.cli", "topics", "acls", "--profile", "production", "--role", "worker"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "prod.tentalis.tasks.v1" in done.stdout


def test_profiles_are_listed_shown_and_chosen(settings_file: Path) -> None:
    def current() -> list[str]:
        rows = json.loads(runner.invoke(app, ["profile", "list", "-o", "json"]).stdout)
        return [row["profile"] for row in rows if row["current"]]

    assert current() == ["staging"]
    shown = runner.invoke(app, ["profile", "show", "production"])
    assert "***" in shown.stdout and "hunter2" not in shown.output and "rocksdb" in shown.stdout
    dry = runner.invoke(app, ["profile", "use", "production", "--dry-run"])
    assert dry.exit_code == 0 and "would use" in dry.stderr and settings_file.read_text() == FILE
    assert runner.invoke(app, ["profile", "use", "production"]).exit_code == 0
    assert current() == ["production"]
    assert settings_file.read_text() == FILE.replace("profile: staging", "profile: production")
    assert runner.invoke(app, ["profile", "use", "nowhere"]).exit_code == 2
