"""The command line without a broker: what it prints where, its exit codes, and that it stays light."""

import ast
import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import tentalis.cli
from schemas import topics
from schemas.records import Record, Result, Tick
from schemas.tensors import float32_bytes
from schemas.wire.codec import Codec
from streams.apps.join.processor import limits_of
from tentalis.cli.main import app
from tentalis.cli.produce import parsed, written
from tentalis.cli.shared import settings as command_settings
from tentalis.cli.shared import stack_checks
from tentalis.cli.shared.deferred import DeferredCommand
from tentalis.cli.shared.errors import CommandError, explain
from tentalis.cli.shared.output import print_table
from tentalis.cli.shared.record_json import from_plain, to_plain
from tentalis.cli.shared.settings import resolve_settings
from tentalis.cli.shared.topic_tail import Start, as_object, begin_offset, parse_start
from tentalis.cli.up import READY, _may_settle, _word
from tentalis.kafka import topology
from tentalis.kafka.admin import Impossible
from tentalis.kafka.consumer import Stored
from tentalis.kafka.errors import Unreachable
from tentalis.kafka.producer import checked_size, headers_of
from tentalis.local.disk import Space
from tentalis.local.state import StateDir, write_whole
from tentalis.local.states import ProcessState
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import NoBroker, Settings
from tentalis.text.shorten import shortened
from tests.support.verify_run import consistent
from trainer.distributed.nodes import NodePlace
from trainer.run.stop_condition import StopCondition

runner = CliRunner()
SERVE_HELPERS = ("plain_streams", "__init__", "app", "options", "scorer_file", "stream")
NEEDED_BY_HELP = {
    "tentalis.cli",
    "tentalis.cli.main",
    "tentalis.cli.shared",
    *(f"tentalis.cli.shared.{name}" for name in ("deferred", "earlier_system", "errors", "startup")),
    "tentalis.service",
    *(f"tentalis.service.{name}" for name in ("error_messages", "exit_codes", "stdout")),
}
HEAVY = ("torch", "faust", "confluent_kafka", "transformers", "numpy", "pydantic", "rich", "yaml", "asyncio")


@pytest.fixture(autouse=True)
def _nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TENTALIS_BOOTSTRAP", "TENTALIS_DEBUG", "TENTALIS_LOG", "SCHEMA_REGISTRY_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path / "home"))


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom tentalis.cli.main import app\n"
        "try: app(['--help'], prog_name='tentalis')\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        "print(sorted(name for name in sys.modules if name.startswith(('tentalis.', 'streams', 'trainer', 'schemas'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    commands = (
        "demo up down status topics dlq schemas replay verify serve worker manager train consume produce doctor version"
    )
    for command in commands.split():
        assert f"\n  {command} " in done.stdout
    assert done.stdout.splitlines()[-2] == "[]"
    assert set(ast.literal_eval(done.stdout.splitlines()[-1])) == NEEDED_BY_HELP, "commands are imported when called"


def test_help_of_every_command_imports_no_large_package() -> None:
    program = (
        "import contextlib, io, sys\nfrom typer.main import get_command\nfrom tentalis.cli.main import app\n"
        "def called(*arguments):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as said:\n"
        "        try: app([*arguments, '--help'], prog_name='tentalis')\n"
        "        except SystemExit: pass\n"
        "    assert said.getvalue().startswith('Usage: tentalis'), arguments\n"
        "called()\n"
        "for name, command in get_command(app).commands.items():\n"
        "    called(name)\n"
        "    for below in getattr(command, 'commands', ()):\n"
        "        called(name, below)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "command",
    [
        "topics apply",
        "topics trim",
        "restart",
        "start",
        "stop",
        "logs",
        "events",
        "log-level",
        "dlq replay",
        "schemas check",
        "serve model",
        "serve join",
        "serve hinting",
        "worker",
        "manager",
        "train",
        "verify",
        "export",
        "import",
        "rollouts list",
        "rollouts query",
        "consume",
    ],
)
def test_every_command_has_help(command: str) -> None:
    done = runner.invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert "Usage: " in done.stdout


def test_each_command_is_a_module_named_as_the_command() -> None:
    def names(folder: Path, helpers: Sequence[str]) -> set[str]:
        return {
            path.stem.removesuffix("_").replace("_", "-") for path in folder.glob("*.py") if path.stem not in helpers
        }

    tree = get_command(app)
    assert isinstance(tree, TyperGroup)
    deferred = tree.commands["serve"]
    assert isinstance(deferred, DeferredCommand)
    serve = deferred.load()
    assert isinstance(serve, TyperGroup)
    # Processes with commands of their own, outside the group.
    processes = {"worker", "manager"}
    folder = Path(tentalis.cli.__file__).parent
    parts = ("groups_delete", "groups_skip", "policy_assign", "policy_compare", "policy_export")
    assert names(folder, ("__init__", "__main__", "main", *parts)) == set(tree.commands) - processes - {"serve"}
    # A stream application without options of its own needs no module here.
    plain = {each.name for each in topology.streams()}
    assert names(folder / "serve", SERVE_HELPERS) | plain == set(serve.commands) | processes


def test_a_usage_error_exits_with_2() -> None:
    assert runner.invoke(app, ["topics", "nonsense"]).exit_code == 2
    assert runner.invoke(app, ["consume"]).exit_code == 2
    assert runner.invoke(app, ["dlq", "list", "--stage", "proces"]).exit_code == 2
    assert runner.invoke(app, ["version", "-o", "xml"]).exit_code == 2


def test_only_a_drop_that_is_carried_out_needs_its_reason() -> None:
    drop = ["dlq", "drop", "--topic", "tentalis.tasks.v1"]
    done = runner.invoke(app, drop)
    assert done.exit_code == 2 and "no --reason" in done.stderr
    done = runner.invoke(app, [*drop, "--dry-run"])
    assert done.exit_code == 4 and "no Kafka is known" in done.stderr, "it gets as far as asking for the broker"


def test_a_replay_whose_options_cannot_be_meant_exits_with_2_before_anything_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "report.json").touch()
    (tmp_path / "empty").mkdir()
    for options, said in (
        ("--from-step 3 --to-step 2", "--to-step 2 is before --from-step 3"),
        (f"--into {tmp_path / 'full'}", f"--into {tmp_path / 'full'}: not empty"),
        (f"--into {tmp_path / 'full' / 'report.json'}", "report.json: not a folder"),
        ("--set lr", "expected SETTING=VALUE"),
        ("--set lr=1 --ranks 2", "--set cannot be combined with"),
    ):
        done = runner.invoke(app, ["replay", "run", *options.split()])
        assert done.exit_code == 2 and said in done.stderr, done.stderr
    for options in ("--from-step 2 --to-step 2", f"--into {tmp_path / 'empty'}", f"--into {tmp_path / 'new'}"):
        done = runner.invoke(app, ["replay", "run", *options.split()])
        assert done.exit_code == 4, done.stderr


@pytest.mark.parametrize(
    ("options", "goal"),
    [
        ([], StopCondition()),
        (["--once"], StopCondition(1, caught_up=True)),
        (["--until-caught-up"], StopCondition(caught_up=True)),
        (["--steps", "3"], StopCondition(3)),
        (["--steps", "3", "--until-caught-up"], StopCondition(3, caught_up=True)),
    ],
)
def test_what_training_by_hand_is_asked_for(
    options: list[str], goal: StopCondition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def main(*given: Any) -> int:
        asked.append(given)
        return 0

    monkeypatch.setattr("trainer.run.launch.main", main)
    monkeypatch.setattr("tentalis.cli.train.settings_of_role", lambda _, bootstrap: Settings(bootstrap=bootstrap))
    file = tmp_path / "trainer.yaml"
    file.write_text("run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\nsteps: 9\n")
    done = runner.invoke(
        app, ["train", "--config", str(file), "--ranks", "2", "--bootstrap-server", "kafka:9092", *options]
    )
    assert done.exit_code == 0, done.stderr
    ((settings, config, ranks, _, found, place),) = asked
    assert place is None
    assert (settings.bootstrap, config.run_id, config.steps, ranks) == ("kafka:9092", "r", 9, 2)
    assert found == goal


@pytest.mark.parametrize(
    ("node", "code", "place"), [("1", 0, NodePlace(1, 2, "first", 29400)), ("2", 2, None), ("-1", 2, None)]
)
def test_the_place_among_several_nodes_comes_from_options_or_variables(
    node: str, code: int, place: NodePlace | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[NodePlace | None] = []

    def main(*given: Any) -> int:
        found.append(given[-1])
        return 0

    monkeypatch.setattr("trainer.run.launch.main", main)
    monkeypatch.setattr("tentalis.cli.train.settings_of_role", lambda _, bootstrap: Settings(bootstrap=bootstrap))
    monkeypatch.setenv("TENTALIS_TRAINER_NODE", node)
    file = tmp_path / "trainer.yaml"
    file.write_text("run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\nsteps: 9\n")
    done = runner.invoke(app, ["train", "--config", str(file), "--nodes", "2", "--rendezvous", "first:29400"])
    assert done.exit_code == code, done.stderr
    assert found == ([] if place is None else [place])


def test_a_configuration_is_printed_and_nothing_is_trained(tmp_path: Path) -> None:
    done = runner.invoke(app, ["train", "--print-config"])
    assert done.exit_code == 0 and "\nbatch_rollouts: 32\n" in done.stdout
    assert runner.invoke(app, ["train"]).exit_code == 2
    file = tmp_path / "trainer.yaml"
    file.write_text("run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\nbatch_rollouts: 9\n")
    assert "\nbatch_rollouts: 9\n" in runner.invoke(app, ["train", "--config", str(file), "--print-config"]).stdout
    both = runner.invoke(app, ["train", "--config", str(file), "--once", "--steps", "2"])
    assert both.exit_code == 2 and "--once is one step" in both.stderr


def test_no_kafka_anywhere_exits_with_4_and_says_what_to_do() -> None:
    done = runner.invoke(app, ["topics", "list"])
    assert done.exit_code == 4
    assert done.stdout == ""
    assert "tentalis up" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_that_does_not_answer_exits_with_4(monkeypatch: pytest.MonkeyPatch) -> None:
    original = command_settings.connected_settings
    monkeypatch.setattr(command_settings, "connected_settings", lambda bootstrap: original(bootstrap, timeout=0.5))
    done = runner.invoke(app, ["topics", "list", "--bootstrap-server", "127.0.0.1:1"])
    assert done.exit_code == 4
    assert "no Kafka answers on 127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("command", ["up", "up --detach", "demo"])
def test_a_stack_on_a_dead_kafka_or_without_room_does_not_begin(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tentalis.local.disk.space", lambda folder: Space(folder, 2**20, 2**30, None))
    full = runner.invoke(app, command.split())
    assert full.exit_code == ExitCode.ERROR
    assert "no space left on" in full.stderr and "TENTALIS_HOME" in full.stderr
    monkeypatch.setattr(stack_checks, "PROBE_S", 0.2)
    monkeypatch.setenv("TENTALIS_BOOTSTRAP", "127.0.0.1:1")
    dead = runner.invoke(app, command.split())
    assert dead.exit_code == ExitCode.UNREACHABLE
    assert "no Kafka answers on 127.0.0.1:1" in dead.stderr and "TENTALIS_BOOTSTRAP" in dead.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("command", ["up", "up --detach", "demo"])
def test_a_second_stack_in_one_home_is_named_before_anything_else(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own consumer groups would be taken for those of a stack elsewhere on the same Kafka."""
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(stack_checks, "PROBE_S", 0.2)
    monkeypatch.setenv("TENTALIS_BOOTSTRAP", "127.0.0.1:1")
    with StateDir(tmp_path / "home"):
        refused = runner.invoke(app, command.split())
    assert refused.exit_code == ExitCode.ERROR
    assert f"already runs in {tmp_path / 'home'}" in refused.stderr and "tentalis down" in refused.stderr


def process(state: str, message: str = "", *, confirmed: bool = True) -> dict[str, Any]:
    return {"state": state, "message": message, "confirmed": confirmed}


def test_a_stack_is_ready_when_everything_is_and_has_been_heard_since() -> None:
    ready, starting, done = process("ready"), process("starting"), process("done")
    degraded, halted = process("degraded", "v3 is damaged"), process("halted", "too many\nlog")
    assert _word({"a": ready, "b": ready, "topics": done}) == READY
    assert _word({"a": ready, "trainer": process("ready", confirmed=False)}) is None
    assert _word({"a": ready, "b": starting, "c": degraded}) is None
    word = "not ready: b is degraded: v3 is damaged; c is halted: too many"
    assert _word({"a": ready, "b": degraded, "c": halted, "d": process("waiting", "waits for b")}) == word
    for state in ("unresponsive", "crash-looping", "failed"):
        assert _word({"a": ready, "b": process(state, "why")}) == f"not ready: b is {state}: why"
        # A trainer that ended for good is told of at once: only an operator starts it again.
        assert _may_settle({"a": ready, "b": process(state, "why")}) == (state not in ("failed", "halted"))


def test_status_names_a_full_disk_although_its_file_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StateDir(tmp_path / "home"):
        one = {"state": "ready", "pid": 1, "uptime": 2.0, "restarts": 0, "last_exit": None, "message": ""}
        written = {"supervisor": os.getpid(), "updated": time.time() - 60, "processes": {"join": one}}
        write_whole(tmp_path / "home" / "status.json", written)
        done = runner.invoke(app, ["status"])
        assert done.exit_code == ExitCode.ERROR, "a supervisor that does not write knows nothing"
        assert re.search(r"\b(6\d|[7-9]\d|1\d\d) s ago", done.stdout), done.stdout
        monkeypatch.setattr("tentalis.local.disk.space", lambda folder: Space(folder, 2**20, 2**30, None))
        done = runner.invoke(app, ["status"])
        assert done.exit_code == ExitCode.ERROR
        assert "no space left on" in done.stdout and "(free 1.0 MiB of 1.0 GiB)" in done.stdout
        shown = json.loads(runner.invoke(app, ["status", "-o", "json"]).stdout)
        assert "no space left on" in shown["shortage"]


@pytest.mark.parametrize("state", [state.value for state in ProcessState])
def test_status_exits_with_1_for_every_process_in_trouble(tmp_path: Path, state: str) -> None:
    with StateDir(tmp_path / "home"):
        one = {"pid": 1, "uptime": 2.0, "restarts": 0, "last_exit": None, **process(state, "why\nlog")}
        written = {"supervisor": os.getpid(), "updated": time.time(), "processes": {"join": one}}
        write_whole(tmp_path / "home" / "status.json", written)
        done = runner.invoke(app, ["status"])
    bad = state in ("degraded", "unresponsive", "crash-looping", "failed", "halted")
    assert done.exit_code == (ExitCode.ERROR if bad else ExitCode.OK)
    assert done.stdout.splitlines()[1].split()[:2] == ["join", state] and done.stdout.rstrip().endswith("why")


def test_status_is_watched_until_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = iter([None, KeyboardInterrupt])

    def sleep(seconds: float) -> None:
        if (interrupt := next(pauses)) is not None:
            raise interrupt

    monkeypatch.setattr("tentalis.cli.status.time", SimpleNamespace(sleep=sleep, time=time.time))
    done = runner.invoke(app, ["status", "--watch"])
    assert done.stdout.count("no stack runs") == 2


def test_the_status_of_a_cluster_that_is_away_is_watched_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def settings(bootstrap: str | None) -> Settings:
        looks.append(1)
        match len(looks):
            case 1:
                raise Unreachable("no answer")
            case 2:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT, "gone between two questions"))
            case 3:
                raise TimeoutError("no answer in time")
        raise KeyboardInterrupt

    monkeypatch.setattr("tentalis.cli.status.connected_settings", settings)
    monkeypatch.setattr("tentalis.cli.status.time", SimpleNamespace(sleep=lambda seconds: None))
    done = runner.invoke(app, ["status", "--watch"], env={"TENTALIS_BOOTSTRAP": "kafka:9092"})
    for error in ("no answer", "Kafka: gone between two questions", "no answer in time"):
        assert f"error: {error}\n" in done.stderr
    looks.clear()
    assert runner.invoke(app, ["status", "--bootstrap-server", "kafka:9092"]).exit_code == ExitCode.UNREACHABLE


def test_followed_logs_have_the_processes_that_start_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(level: str, text: str) -> str:
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 {level} x: {text}\n"

    join, later = (tmp_path / "home" / "logs" / f"{name}.log" for name in ("join", "scoring"))
    join.parent.mkdir(parents=True)
    join.write_text("2026-01-31 12:00:00,000 ERROR x: long ago\n" + line("WARNING", "first"))

    def sleep(seconds: float) -> None:
        if later.exists():
            raise KeyboardInterrupt
        later.write_text(line("INFO", "below") + line("ERROR", "second"))

    monkeypatch.setattr("tentalis.cli.logs.time", SimpleNamespace(sleep=sleep))
    done = runner.invoke(app, ["logs", "-f", "--since", "10m", "--level", "warning"])
    first, second = done.stdout.splitlines()
    assert first.endswith("WARNING x: first")
    assert second.startswith("scoring | ") and second.endswith("ERROR x: second")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTALIS_DEBUG", "1")
    done = runner.invoke(app, ["topics", "list"])
    assert "Traceback" in done.stderr
    assert "error: no Kafka" in done.stderr


def test_version_as_json_is_one_object() -> None:
    done = runner.invoke(app, ["version", "-o", "json"])
    assert json.loads(done.stdout)["faust-streaming"] == "0.15.3"
    assert runner.invoke(app, ["--version"]).stdout.startswith("tentalis ")


def test_status_without_a_stack_says_so_and_exits_with_1() -> None:
    done = runner.invoke(app, ["status", "-o", "json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["running"] is False


def test_down_without_a_stack_is_no_error() -> None:
    done = runner.invoke(app, ["down"])
    assert done.exit_code == 0
    assert "no stack runs" in done.stderr


def test_a_wrong_log_level_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTALIS_LOG", "loud")
    assert runner.invoke(app, ["version"]).exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("x", 3), 3),
        (NoBroker("x"), 4),
        (Impossible("x"), 3),
        (ValueError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_errors_have_stable_exit_codes(error: Exception, code: int) -> None:
    message, found = explain(error)
    assert found == code
    assert "x" in message


@pytest.mark.parametrize("broken", ["batch_rolouts: 8", "batch_rollouts: many", "batch_rollouts: ["])
def test_a_bad_training_configuration_is_a_usage_error(broken: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"run_id: r\npolicy: p\nbase_model: m\nbase_model_name: m\n{broken}\n", encoding="utf-8")
    refused = runner.invoke(app, ["train", "--config", str(config)])
    assert refused.exit_code == ExitCode.USAGE and str(config) in refused.stderr


def test_kafka_being_away_is_unreachable_and_other_kafka_errors_are_errors() -> None:
    from confluent_kafka import KafkaError, KafkaException

    assert explain(KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN)))[1] == 4
    assert explain(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)))[1] == 1


def test_a_file_that_is_not_there_is_named_without_numbers(tmp_path: Path) -> None:
    missing = tmp_path / "lines.jsonl"
    with pytest.raises(OSError) as caught:
        missing.open()
    assert explain(caught.value) == (f"{missing}: No such file or directory", 1)


def test_a_table_shows_yes_no_and_a_dash_for_booleans_and_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("topic", "managed"), [("a", True), ("b", False), ("c", None), ("d", 0)])
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["MANAGED", "yes", "no", "-", "0"]


# --- where Kafka is ---------------------------------------------------------------------------------------------------


def running_stack(home: Path, monkeypatch: pytest.MonkeyPatch, *, running: bool = True) -> dict[str, str]:
    home.mkdir()
    (home / "status.json").write_text("{}")
    (home / "ports.json").write_text(json.dumps({"broker": 4711}))
    monkeypatch.setattr("tentalis.local.state.StateDir.status", lambda self: {"running": running})
    return {"TENTALIS_HOME": str(home)}


def test_flag_before_environment_before_the_running_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = running_stack(tmp_path / "stack", monkeypatch)
    assert resolve_settings(None, env).bootstrap == "127.0.0.1:4711"
    env["TENTALIS_BOOTSTRAP"] = "environment:1"
    assert resolve_settings(None, env).bootstrap == "environment:1"
    assert resolve_settings("flag:2", env).bootstrap == "flag:2"


def test_a_stack_that_does_not_run_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_settings(None, running_stack(tmp_path / "stack", monkeypatch, running=False)).bootstrap is None


def test_a_wrong_setting_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTALIS_SASL_PASSWORD_FILE", "nowhere")
    done = runner.invoke(app, ["topics", "list"])
    assert done.exit_code == 2
    assert "TENTALIS_SASL_PASSWORD_FILE=nowhere: no such file" in done.stderr


# --- consume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", Start()),
        ("latest", Start(back=0)),
        ("17", Start(offset=17)),
        ("-5", Start(back=5)),
        ("2026-01-01T00:00:00Z", Start(at_ms=1_767_225_600_000)),
        ("2026-01-01T01:00:00+01:00", Start(at_ms=1_767_225_600_000)),
        ("1m", Start(at_ms=1_767_225_600_000)),
        ("99999d", Start(at_ms=0)),
        ("1969-12-31T23:59:59.999Z", Start(at_ms=0)),
    ],
)
def test_a_start_is_an_offset_a_count_from_the_end_or_a_time(text: str, start: Start) -> None:
    assert parse_start(text, now=1_767_225_660_000) == start


def test_an_invalid_start_names_the_allowed_forms() -> None:
    with pytest.raises(CommandError, match="2026-01-31T12:00:00Z, or an age: 90s"):
        parse_start("yesterday", now=0)


@pytest.mark.parametrize(
    ("start", "at_time", "offset"),
    [
        (Start(), None, 10),
        (Start(offset=3), None, 10),
        (Start(offset=15), None, 15),
        (Start(offset=99), None, 20),
        (Start(back=0), None, 20),
        (Start(back=4), None, 16),
        (Start(back=400), None, 10),
        (Start(at_ms=5), 12, 12),
        (Start(at_ms=5), -1, 20),
    ],
)
def test_the_first_offset_to_read_follows_from_the_start(start: Start, at_time: int | None, offset: int) -> None:
    assert begin_offset(start, 10, 20, at_time) == offset


def test_ticks_are_left_out_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec()
    half = consistent().hints[0].record
    log = [
        stored(topics.HALVES, codec.encode(topics.HALVES, record))
        for record in (Tick(event_time=1, partition=0), half, Tick(event_time=2, partition=0))
    ]
    monkeypatch.setattr("tentalis.cli.consume.reached", lambda bootstrap: nullcontext(Settings()))
    monkeypatch.setattr("tentalis.cli.shared.topic_tail.tail", lambda *_, **__: (each for each in log))
    monkeypatch.setattr("tentalis.kafka.codec.make_codec", lambda *_, **__: codec)

    def shown(*options: str) -> tuple[list[str], str]:
        done = runner.invoke(app, ["consume", topics.HALVES, "--exit", "-o", "json", *options])
        return [json.loads(line)["type"] for line in done.stdout.splitlines()], done.stderr

    assert shown()[0] == ["Hint"] and "left out: 2 ticks" in shown()[1] and "--ticks" in shown()[1]
    assert shown("-n", "1")[0] == ["Hint"]
    assert shown("--ticks") == (["Tick", "Hint", "Tick"], "")


def stored(topic: str, value: bytes | None, **headers: bytes) -> Stored:
    return Stored(topic, 1, 2, 1_767_225_600_123, "key", value, tuple(headers.items()))


def test_a_record_becomes_one_object_with_tokens_as_numbers() -> None:
    result = consistent().results[0].record
    found = as_object(stored(topics.RESULTS, Codec().encode(topics.RESULTS, result), ce_id=b"x"), Codec())
    assert (found["type"], found["timestamp"], found["headers"]) == (
        "Result",
        "2026-01-01T00:00:00.123Z",
        {"ce_id": "x"},
    )
    assert found["value"]["response_token_ids"] == [5, 6]
    assert found["value"]["sampler_logprobs"] == [-0.5, -0.5]
    assert from_plain(Result, json.loads(json.dumps(found["value"]))) == result


def test_bytes_that_are_no_record_are_shown_and_explained() -> None:
    found = as_object(stored(topics.TASKS, b"\xde\xad"), Codec())
    assert "bad magic dead" in found["error"]
    assert base64.b64decode(found["value_base64"]) == b"\xde\xad"


def test_a_dead_letter_shows_its_context_apart_from_its_own_headers() -> None:
    headers = {"tentalis.dlq.error-stage": b"decode", "ce_id": b"x"}
    found = as_object(Stored(topics.dlq(topics.TASKS), 1, 2, 3, None, b"\xde", tuple(headers.items())), Codec())
    assert found["dlq"] == {"error-stage": "decode"}
    assert found["headers"] == {"ce_id": "x"}
    assert found["value_base64"] == "3g=="


def test_tombstones_and_schemas_are_shown_as_what_they_are() -> None:
    assert as_object(stored(topics.ROLLOUTS, None), Codec())["tombstone"] is True
    assert as_object(stored(topics.SCHEMAS, b'{"name": "x"}'), Codec())["value"] == '{"name": "x"}'
    assert as_object(stored(topics.TOPIC_IDS, b'{"a": "x"}'), Codec())["value"] == '{"a": "x"}'


def test_float32_has_few_digits_and_loses_no_bit() -> None:
    values = [0.1, -0.0, 1e-38, float("inf"), float("-inf"), float("nan"), 16777217.0]
    result = (
        consistent()
        .results[0]
        .record.model_copy(update={"sampler_logprobs": float32_bytes(values), "response_token_ids": b"\0" * 28})
    )
    plain = to_plain(result)
    assert plain["sampler_logprobs"][:2] == [0.1, -0.0]
    assert plain["sampler_logprobs"][3:6] == ["inf", "-inf", "nan"]
    assert from_plain(Result, json.loads(json.dumps(plain, allow_nan=False))) == result


# --- produce ----------------------------------------------------------------------------------------------------------

TICK = {"event_time": 1, "partition": 2}


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_line_is_a_record_or_its_envelope() -> None:
    assert parsed(line(TICK), ("Tick",)).key == "tick/2"
    assert parsed(line({"type": "Tick", "value": TICK, "offset": 3}), ("Open", "Tick")).key == "tick/2"


@pytest.mark.parametrize(
    ("text", "allowed", "message"),
    [
        (b"{", ("Tick",), "not JSON"),
        (b"\xff\xfe", ("Tick",), "not JSON: 'utf-8' codec can't decode"),
        (b"[" * 200_000, ("Tick",), "nested too deeply"),
        (b"9" * 5000, ("Tick",), "not JSON: Exceeds the limit"),
        (b"[]", ("Tick",), "expected an object, not a list"),
        (line(TICK), ("Open", "Tick"), "missing or unknown record type"),
        (line({"type": ["Tick"], "value": {}}), ("Tick",), "missing or unknown record type"),
        (line({"type": "Task", "value": {}}), ("Tick",), "missing or unknown record type"),
        (line({"event_time": 1, "partition": -2}), ("Tick",), "not a Tick: partition: .*greater than or equal"),
        (line({"event_time": 1, "partition": 1, "x": 1}), ("Tick",), "not a Tick: x: Extra inputs"),
    ],
)
def test_a_line_that_is_no_record_says_why(text: bytes, allowed: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed(text, allowed)


class Encoded:
    """A publisher that does all that one does before it queues."""

    sent = 0

    def send(self, topic: str, record: Record) -> None:
        checked_size(topic, record.key, Codec().encode(topic, record))
        headers_of(record, "test")
        self.sent += 1


def test_a_value_that_no_schema_has_room_for_is_the_fault_of_its_line() -> None:
    lines = [line(TICK), line(TICK | {"event_time": 2**63}), b"", line(TICK | {"event_time": -(2**63)})]
    found = list(written(Encoded(), topics.HALVES, lines, ("Tick",)))  # type: ignore[arg-type]
    assert found[::2] == [None, None]
    assert found[1] == "line 2: a number does not fit the 64 bits of its field"


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [2**31, 2**63, -(2**63) - 1, 10**400, 1e308, float("nan"), float("-inf"), "nan", "", "\ud800", "\0"]
    ),
    st.text(max_size=5),
    st.lists(st.integers() | st.floats(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_a_line_holds_it_is_a_record_or_named(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["Task", "Result", "Feedback", "Score"]))
    log = consistent()
    seen = {"Task": log.tasks, "Result": log.results, "Feedback": log.feedback, "Score": log.scores}[kind]
    value: Any = to_plain(seen[0].record)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(value)[1:]))
        inside = value
        for step in path[:-1]:
            inside = inside[step]
        if data.draw(st.booleans()):
            inside[path[-1]] = data.draw(LEAVES)
        else:
            del inside[path[-1]]
    raw = data.draw(st.sampled_from([json.dumps(value).encode(), json.dumps(value).encode()[:-1]]) | st.binary())
    topic = next(topic.name for topic in topics.table().topics.values() if kind in topic.records)
    publisher = Encoded()
    found = list(written(publisher, topic, [b"\n", raw], (kind,)))  # type: ignore[arg-type]
    assert publisher.sent == found.count(None)
    assert all(problem is None or problem.startswith("line 2: ") for problem in found)


def test_token_fields_may_be_lists_or_base64_and_nothing_else() -> None:
    plain = to_plain(consistent().results[0].record)
    plain["response_token_ids"] = base64.b64encode(b"\5\0\0\0\6\0\0\0").decode()
    assert from_plain(Result, plain) == consistent().results[0].record
    for wrong in (["a"], 7, "***", [2**40]):
        with pytest.raises(ValueError, match="response_token_ids: not a list of int32-le numbers"):
            from_plain(Result, plain | {"response_token_ids": wrong})


def test_a_key_without_raw_and_a_foreign_topic_are_usage_errors() -> None:
    assert runner.invoke(app, ["produce", topics.TASKS, "--key", "x", "--bootstrap-server", "x:1"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--session, --user or --before"),
        (("--policy", "assistant"), "--session, --user or --before"),
        (("--before", "soon"), "2026-01-31T12:00:00Z"),
        (("--before", "2999-01-01"), "is in the future"),
    ],
)
def test_forget_without_a_subject_is_a_usage_error(arguments: tuple[str, ...], told: str) -> None:
    done = runner.invoke(app, ["forget", *arguments])
    assert done.exit_code == 2
    assert told in done.stderr


def test_no_line_of_a_list_of_commands_is_cut_off() -> None:
    for group in ([], ["topics"], ["dlq"], ["serve"], ["schemas"]):
        shown = runner.invoke(app, [*group, "--help"], terminal_width=80).stdout
        assert "Commands:" in shown and "..." not in shown.split("Commands:")[1], group


@pytest.mark.parametrize("how", [{"args": ("--marker-ttl", "3600")}, {"env": {"TENTALIS_MARKER_TTL": "3600"}}])
def test_a_join_that_forgets_tasks_before_they_are_over_is_refused(how: dict[str, Any]) -> None:
    done = runner.invoke(app, ["serve", "join", *how.get("args", ())], env=how.get("env"))
    assert done.exit_code == 2
    assert ("--marker-ttl 3600" in done.stderr) == ("args" in how) and "more than 3,600 s" in done.stderr
    assert limits_of(3_600_001).marker_ttl_ms == 3_600_001


def test_a_topic_full_of_garbage_does_not_hide_what_was_asked_for() -> None:
    assert shortened(list("abcde")) == list("abcde")
    assert shortened(list("abcdefg")) == [*"abcde", "and 2 more (-o json lists them)"]


@pytest.mark.parametrize(
    ("given", "dtype"), [((), None), (("--dtype", "auto"), None), (("--dtype", "bfloat16"), "bfloat16")]
)
def test_the_precision_auto_of_serve_policies_is_what_the_server_declares(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], dtype: str | None
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("tentalis.policies.process.serve", lambda settings, **options: seen.append(options["dtype"]))
    monkeypatch.setattr("tentalis.cli.serve.policies.settings_of_role", lambda role, bootstrap: resolve_settings())
    done = runner.invoke(app, ["serve", "policies", "--server", "http://localhost:9", *given])
    assert done.exit_code == 0 and seen == [dtype], done.output
