"""Every command keeps the promises of docs/reference/commands.md: formats, dry runs, completion, earlier names."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.testing
import yaml
from typer.testing import CliRunner

from tentalis.cli.main import COMMANDS, app
from tentalis.cli.shared.earlier_system import replacement
from tentalis.cli.shared.output import OutputFormat, print_data
from tentalis.local.control import ControlRequest, ControlServer
from tentalis.local.state import StateDir
from tests.support.commands import ADDITIONS, INTERRUPTS, LEAVES, MUTATIONS, OPERATES, PROCESSES, READS, options

runner = CliRunner()


def test_every_command_is_known_as_one_that_reads_or_changes_something() -> None:
    processes = {name for name in LEAVES if name in PROCESSES or name.startswith("serve ")}
    assert set(LEAVES) - processes == MUTATIONS | ADDITIONS | OPERATES | READS, "add a new command to its set"


@pytest.mark.parametrize("name", sorted(MUTATIONS | ADDITIONS | OPERATES | READS))
def test_every_command_with_output_has_the_option_output(name: str) -> None:
    shown = runner.invoke(app, [*name.split(), "--help"]).stdout
    assert "-o, --output <table|json|yaml" in shown


@pytest.mark.parametrize("name", sorted(MUTATIONS | ADDITIONS | OPERATES))
def test_what_changes_something_has_a_dry_run(name: str) -> None:
    found = options(LEAVES[name])
    assert "--dry-run" in found
    assert ("--yes" in found and "-y" in found) is (name in MUTATIONS | INTERRUPTS)


@pytest.mark.parametrize("name", sorted(READS))
def test_what_only_reads_asks_nothing(name: str) -> None:
    assert not {"--dry-run", "--yes"} & options(LEAVES[name]).keys()


def test_every_command_has_help_and_each_option_is_explained() -> None:
    for name, command in LEAVES.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None) or not parameter.opts[0].startswith("-"), (name, parameter.name)


def test_the_short_help_is_the_one_of_the_list() -> None:
    shown = runner.invoke(app, ["--help"]).stdout
    for name, _, short in COMMANDS:
        assert f"\n  {name} " in shown and short.rstrip(".")[:40] in shown


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("topics list --output", "Option '--output' requires an argument."),
        ("topics list -o", "Option '-o' requires an argument."),
        ("topics list --bootstrap-server --output json", "Option '--bootstrap-server' needs a value, and --output"),
        ("topics list --bootstrap-server --output=json", "Option '--bootstrap-server' needs a value, and --output"),
        ("learn prompts --set --loss rl", "Option '--set' needs a value, and --loss follows it."),
        ("version -o --help", "Option '--output' needs a value, and --help follows it."),
        ("version --output=--help", "Invalid value for '--output'"),
        ("consume --exit=3 x", "Option '--exit' does not take a value."),
    ],
)
def test_an_option_without_its_value_is_named_with_its_command(line: str, wrong: str) -> None:
    done = runner.invoke(app, line.split())
    command = line[: line.index(" -")].removesuffix(" prompts")
    assert done.exit_code == 2 and f"\n\nError: {wrong}" in done.stderr
    assert done.stderr.startswith(f"Usage: tentalis {command} [OPTIONS]")


def test_a_misspelt_command_is_corrected() -> None:
    done = runner.invoke(app, ["topcs"])
    assert done.exit_code == 2 and "topics" in done.stderr


# --- processes of the local stack -------------------------------------------------------------------------------------


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ControlRequest]]:
    """The requests to the supervisor of a stack with a process `join`, which is then ready or stopped."""
    asked: list[ControlRequest] = []
    state = {"join": {"state": "ready", "pid": 7, "message": ""}}

    def handle(request: ControlRequest) -> dict[str, dict[str, Any]]:
        asked.append(request)
        if request.action in ("stop", "restart", "start"):
            state["join"]["state"] = "stopped" if request.action == "stop" else "ready"
        return {name: state[name] for name in request.names}

    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    with StateDir(tmp_path):
        server = ControlServer(tmp_path, handle)
        yield asked
        server.close()


@pytest.mark.parametrize("command", ["stop", "restart", "start"])
def test_a_dry_run_of_a_process_command_only_asks_for_its_state(command: str, stack: list[ControlRequest]) -> None:
    done = runner.invoke(app, [command, "join", "--dry-run", "-o", "json"])
    assert json.loads(done.stdout) == [{"process": "join", "action": f"would {command}", "state": "ready", "pid": 7}]
    assert {request.action for request in stack} == {"status"}
    done = runner.invoke(app, [command, "join", "-o", "json"])
    (after,) = json.loads(done.stdout)
    assert (after["action"], after["state"]) == (command, "stopped" if command == "stop" else "ready")
    assert [request.action for request in stack][-1] == command


def test_on_a_terminal_an_interruption_asks(stack: list[ControlRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer.testing._NamedTextIOWrapper, "isatty", lambda self: True)
    assert runner.invoke(app, ["stop", "join"], input="n\n").exit_code == 1
    assert "stop" not in {request.action for request in stack}
    assert runner.invoke(app, ["stop", "join"], input="y\n").exit_code == 0
    assert runner.invoke(app, ["restart", "join", "--yes"], input="").exit_code == 0
    assert runner.invoke(app, ["start", "join"], input="").exit_code == 0


def test_a_dry_run_of_log_level_and_down_changes_nothing(stack: list[ControlRequest], tmp_path: Path) -> None:
    done = runner.invoke(app, ["log-level", "join", "debug", "--dry-run", "-o", "yaml"])
    assert yaml.safe_load(done.stdout) == {"process": "join", "level": "DEBUG", "changed": False}
    assert {request.action for request in stack} == {"status"}
    done = runner.invoke(app, ["down", "--dry-run", "-o", "json"])
    assert json.loads(done.stdout) == {"home": str(tmp_path), "pid": os.getpid(), "stopped": False}


def test_a_dry_run_of_up_lists_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TENTALIS_BOOTSTRAP", raising=False)
    done = runner.invoke(app, ["up", "--gateway", "--scale", "worker=2", "--dry-run", "-o", "json"])
    names = [row["process"] for row in json.loads(done.stdout)]
    assert names[:2] == ["broker", "topics"] and {"gateway", "worker", "worker-2", "trainer", "join"} < {*names}
    assert "manager" not in names and not (tmp_path / "home").exists()


# --- formats ----------------------------------------------------------------------------------------------------------


def test_yaml_holds_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": "a: b", "none": None, "lines": "x\ny", "rows": [{"n": 1}, {"n": 2.5}], "path": Path("/tmp/x")}
    print_data(OutputFormat.JSON, value)
    as_json = capsys.readouterr().out
    print_data(OutputFormat.YAML, value)
    print_data(OutputFormat.YAML, value)
    first, second = yaml.safe_load_all(capsys.readouterr().out)
    assert as_json.count("\n") == 1 and json.loads(as_json) == first == second


def test_a_command_prints_yaml() -> None:
    found = yaml.safe_load(runner.invoke(app, ["version", "-o", "yaml"]).stdout)
    assert found == json.loads(runner.invoke(app, ["version", "-o", "json"]).stdout)


# --- earlier systems --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "train --backend standalone --env terminal --model distilgpt2 --batch-size 8 --device cpu",
            "base_model: distilgpt2",
        ),
        ("train --backend=dapo", "loss: dapo"),
        ("train --env terminal", "tentalis worker"),
        ("serve --docker --services", "tentalis up --gateway"),
        ("serve --services", "tentalis serve NAME"),
        ("init --model qwen2.5:1.5b --config-dir .", "tentalis up --policy-model qwen2.5:1.5b"),
    ],
)
def test_a_command_line_of_the_earlier_system_is_answered_with_its_replacement(line: str, said: str) -> None:
    done = runner.invoke(app, line.split())
    assert done.exit_code == 2 and said in done.stderr and "earlier system" in done.stderr


def test_its_values_are_carried_over() -> None:
    answer = replacement("train", ["--model", "m", "--batch-size=8", "--device", "cuda", "--backend", "openrlhf"])
    assert answer is not None and "with base_model: m, batch_rollouts: 8, device: cuda in FILE" in answer


@pytest.mark.parametrize("line", ["train --print-config", "serve join --help", "status --help", "train --help"])
def test_a_command_line_of_this_system_is_not_taken_for_an_earlier_one(line: str) -> None:
    command, *arguments = line.split()
    assert replacement(command, arguments) is None
    assert runner.invoke(app, line.split()).exit_code == 0


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed(shell: str) -> None:
    done = runner.invoke(app, [], prog_name="tentalis", env={"_TENTALIS_COMPLETE": f"source_{shell}"})
    assert done.exit_code == 0 and f"_TENTALIS_COMPLETE=complete_{shell}" in done.stdout
    if path := shutil.which(shell):
        subprocess.run([path, "-n"], input=done.stdout, text=True, check=True)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("gro", {"groups"}), ("groups re", {"reset-offsets"}), ("topics produce-rate --o", {"--over", "--output"})],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_completes_commands_and_options(shell: str, typed: str, expected: set[str]) -> None:
    words = f"tentalis {typed}"
    environment = {
        "bash": {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": words},
        "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = runner.invoke(app, [], prog_name="tentalis", env={"_TENTALIS_COMPLETE": f"complete_{shell}"} | environment)
    assert done.exit_code == 0, done.output
    assert all(word in done.stdout for word in expected), done.stdout
    assert "policy" not in done.stdout


def test_the_script_of_bash_completes_in_bash(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    program = tmp_path / "tentalis"
    program.write_text(
        f"#!{sys.executable}\nfrom tentalis.cli.main import app\napp(prog_name='tentalis')\n", encoding="utf-8"
    )
    program.chmod(0o755)
    script = (
        f'export PATH="{tmp_path}:$PATH"\n'
        'eval "$(_TENTALIS_COMPLETE=source_bash tentalis)"\n'
        "COMP_WORDS=(tentalis groups re) COMP_CWORD=2\n"
        "_tentalis_completion tentalis re groups\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    home = {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([bash, "-c", script], env=os.environ | home, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["reset-offsets"], done.stderr


# --- dry runs that need no broker -------------------------------------------------------------------------------------


def test_a_dry_run_of_keys_changes_no_file_and_a_revocation_asks(tmp_path: Path) -> None:
    file = ("--keys", str(tmp_path / "keys.json"))
    dry = runner.invoke(app, ["keys", "create", "--user", "ann", "--dry-run", *file])
    assert dry.exit_code == 0 and "would create a key with the scopes chat, feedback for ann" in dry.stderr
    assert not (tmp_path / "keys.json").exists()
    made = json.loads(runner.invoke(app, ["keys", "create", "--user", "ann", *file, "-o", "json"]).stdout)
    assert made["user"] == "ann" and made["key"]

    def revoked() -> Any:
        return json.loads(runner.invoke(app, ["keys", "list", *file, "-o", "json"]).stdout)[0]["revoked"]

    (listed,) = json.loads(runner.invoke(app, ["keys", "list", *file, "-o", "json"]).stdout)
    revoke = ["keys", "revoke", listed["id"], *file]
    assert "would be revoked" in runner.invoke(app, [*revoke, "--dry-run"]).stderr
    assert runner.invoke(app, revoke, input="n\n").exit_code == 1 and revoked() is None
    unanswered = runner.invoke(app, revoke, input="")
    assert unanswered.exit_code == 2 and "\nerror: nobody answered: --yes goes on" in unanswered.stderr
    assert revoked() is None
    assert runner.invoke(app, [*revoke, "--yes"]).exit_code == 0 and revoked() is not None
    again = runner.invoke(app, [*revoke, "--yes"])
    assert again.exit_code == 1 and "no active key" in again.stderr


def test_a_dry_run_of_acls_reaches_for_no_broker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TENTALIS_BOOTSTRAP", raising=False)
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    done = runner.invoke(app, ["topics", "acls", "--role", "groups", "--apply", "--dry-run"])
    assert done.exit_code == 0 and "tentalis-groups" in done.stdout
    assert runner.invoke(app, ["topics", "acls", "--role", "groups", "--apply", "--yes"]).exit_code == 4


@pytest.mark.parametrize("process", ["gateway", "model", "vllm", "env-pool"])
def test_a_port_that_does_not_exist_is_refused_before_anything_is_waited_for(process: str) -> None:
    for port in ("-1", "65536"):
        done = runner.invoke(app, ["serve", process, "--port", port])
        assert done.exit_code == 2 and "'--port'" in done.stderr
