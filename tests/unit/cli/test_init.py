"""`tentalis init`: what it finds, asks, writes and tests."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tentalis.cli.main import app
from tentalis.gateway.settings import GatewaySettings, TokenIdSupport
from tentalis.ops import doctor, machine
from tentalis.ops.first_settings import Answers, gateway_text, settings_text
from tentalis.ops.machine import Machine, look_around
from tentalis.service.settings_file import parse
from tentalis.service.variables import PROTOCOLS, VARIABLES
from tests.support.http_server import serving

runner = CliRunner()
FULL = Machine(
    "kafka:9092", ("H200", "H200"), True, "http://127.0.0.1:11434", ("llama3.2", 'odd"'), ("OPENAI_API_KEY",)
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*(variable.name for variable in VARIABLES), *machine.API_KEYS, "OLLAMA_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    # The doctor has its own tests, and imports torch.
    monkeypatch.setattr(doctor, "CHECKS", (doctor.python, doctor.data))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "look_around", lambda: FULL)


text = st.text(st.characters(exclude_categories=("C",)), min_size=1)


@given(
    st.sampled_from([None, "a:1", "a:1,b:2"]),
    st.sampled_from([None, "staging"]),
    st.sampled_from(PROTOCOLS),
    text,
    text.filter(lambda path: not path.startswith("~")),
)
def test_every_written_file_is_read_and_holds_the_answers(
    bootstrap: str | None, namespace: str | None, protocol: str, username: str, password_file: str
) -> None:
    answers = Answers(bootstrap, namespace, protocol, username, password_file)
    values = parse(settings_text(answers, FULL), Path("/srv/tentalis.yaml")).common
    assert values.get("TENTALIS_BOOTSTRAP") == bootstrap and values.get("TENTALIS_NAMESPACE") == namespace
    assert values["TENTALIS_SASL_USERNAME"] == username and values["TENTALIS_HOME"] == "/srv/.tentalis"
    assert values.get("TENTALIS_SECURITY_PROTOCOL", "PLAINTEXT") == protocol


def test_every_commented_line_is_a_key_that_is_known() -> None:
    for answers in (Answers(), Answers("kafka:1")):
        lines = settings_text(answers, Machine()).splitlines()
        keys = [line[1:] for line in lines if re.match(r"#(?! \S)", line)]
        found = parse("\n".join(keys), Path("/tentalis.yaml"))
        assert found.profiles["production"] and {"TENTALIS_NAMESPACE", "TENTALIS_SSL_CA"} <= {*found.common}


def test_a_backend_is_written_for_ollama_and_for_each_key(tmp_path: Path) -> None:
    assert gateway_text(Machine(ollama="http://127.0.0.1:1")) is None, "it has no models"
    path = tmp_path / "g.yaml"
    path.write_text(str(gateway_text(FULL)), encoding="utf-8")
    ollama, openai = GatewaySettings.from_file(path).backends
    assert ollama.models == FULL.models and ollama.token_ids is TokenIdSupport.NO
    assert (openai.name, openai.key_env) == ("openai", "OPENAI_API_KEY")


def test_init_writes_what_it_found_and_tests_it(found: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hunter2")
    done = runner.invoke(app, ["init"])
    assert done.exit_code == 0, done.stderr
    assert "wrote tentalis.yaml and gateway.yaml" in done.stdout and "2 x H200" in done.stdout
    assert "every setting is valid" in done.stdout and "hunter2" not in done.output
    (row,) = json.loads(runner.invoke(app, ["config", "show", "bootstrap", "-o", "json"]).stdout)
    assert (row["value"], row["origin"]) == ("kafka:9092", str(tmp_path / "tentalis.yaml"))


def test_a_dry_run_writes_nothing_and_a_file_is_replaced_after_a_question(found: None, tmp_path: Path) -> None:
    dry = json.loads(runner.invoke(app, ["init", "--dry-run", "-o", "json"]).stdout)
    assert dry["written"] is False and "kafka:9092" in dry["files"]["tentalis.yaml"] and not [*tmp_path.iterdir()]
    file = tmp_path / "tentalis.yaml"
    file.write_text("log: INFO\n", encoding="utf-8")
    asked = runner.invoke(app, ["init"], input="n\n")
    assert asked.exit_code == 1 and "Replace tentalis.yaml?" in asked.stderr and file.read_text() == "log: INFO\n"
    runner.invoke(app, ["init", "--yes"])
    assert "kafka:9092" in file.read_text()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make", [_fifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "folder", "device"]
)
@pytest.mark.parametrize("name", ["tentalis.yaml", "gateway.yaml"])
def test_what_is_no_file_is_refused_and_left_alone(
    found: None, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    program = "import sys\nfrom tentalis.cli.init import _write\nfrom pathlib import Path\n"
    program += "_write({Path(name): 'log: INFO\\n' for name in ('tentalis.yaml', 'gateway.yaml')}, yes=True)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)  # it may block
    assert f"CommandError: {name} is not a file: " in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_file_of_other_bytes_is_replaced_after_a_question(found: None, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_bytes(b"\xff\xfe")
    assert "Replace gateway.yaml?" in runner.invoke(app, ["init"], input="n\n").stderr
    runner.invoke(app, ["init", "--yes"])
    assert "OPENAI_API_KEY" in (tmp_path / "gateway.yaml").read_text(encoding="utf-8")


def test_a_file_that_cannot_be_written_is_named(found: None, tmp_path: Path) -> None:
    (tmp_path / "tentalis.yaml").symlink_to("tentalis.yaml")
    loop = runner.invoke(app, ["init", "--yes"])
    assert (loop.exit_code, loop.stderr) == (1, "error: tentalis.yaml: Too many levels of symbolic links\n")
    (tmp_path / "tentalis.yaml").unlink()
    (tmp_path / "tentalis.yaml").symlink_to("/proc/tentalis/tentalis.yaml")
    nowhere = runner.invoke(app, ["init", "--yes"])
    assert (nowhere.exit_code, nowhere.stderr) == (
        1,
        f"error: {tmp_path}/tentalis.yaml: No such file or directory\n",
    ), "neither the temporary file nor a folder is named"


def test_with_local_a_kafka_of_this_machine_is_left_alone(found: None) -> None:
    dry = json.loads(runner.invoke(app, ["init", "--local", "--dry-run", "-o", "json"]).stdout)
    assert "\nbootstrap:" not in dry["files"]["tentalis.yaml"]


def test_a_test_that_fails_ends_it_with_1(found: None, tmp_path: Path) -> None:
    done = runner.invoke(app, ["init"])  # the variable of the key is not set
    assert done.exit_code == 1 and "the variable OPENAI_API_KEY is not set" in done.stdout


@pytest.mark.parametrize("options", [["--bootstrap-server", "kafka:9092"], ["--local"]])
def test_a_variable_that_overrides_what_it_wrote_is_named(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENTALIS_BOOTSTRAP", "other:9092")
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path / ".tentalis"))
    checks = json.loads(runner.invoke(app, ["init", *options, "-o", "json"]).stdout)["checks"]
    named = [check["found"] for check in checks if check["check"] == "environment" and check["level"] == "warn"]
    assert named == ["TENTALIS_BOOTSTRAP is set: it takes precedence over tentalis.yaml"]
    monkeypatch.delenv("TENTALIS_BOOTSTRAP")
    checks = json.loads(runner.invoke(app, ["init", *options, "--yes", "-o", "json"]).stdout)["checks"]
    assert "environment" not in {check["check"] for check in checks}


def test_the_wizard_asks_little_and_takes_no_bad_answer(found: None, tmp_path: Path) -> None:
    answers = "broker-1:9093\nstaging\nSASL_SSL\nann\n/secret\n"
    runner.invoke(app, ["init", "--wizard"], input=answers)
    values = parse((tmp_path / "tentalis.yaml").read_text(encoding="utf-8"), tmp_path / "tentalis.yaml").common
    assert values["TENTALIS_BOOTSTRAP"] == "broker-1:9093" and values["TENTALIS_NAMESPACE"] == "staging"
    assert values["TENTALIS_SASL_USERNAME"] == "ann" and values["TENTALIS_SASL_PASSWORD_FILE"] == "/secret"
    own = runner.invoke(app, ["init", "--wizard", "--yes"], input="own\nstate\n")
    assert own.stderr.count("[") == 2, "two questions for a broker of its own"
    assert "\nbootstrap:" not in (tmp_path / "tentalis.yaml").read_text(encoding="utf-8")
    bad = runner.invoke(app, ["init", "--wizard", "--yes"], input="http://kafka\n")
    assert bad.exit_code == 2 and "give host:port" in bad.stderr
    bad = runner.invoke(app, ["init", "--wizard", "--yes"], input="kafka:1\nBad Name!\n")
    assert bad.exit_code == 2 and "TENTALIS_NAMESPACE=Bad Name!" in bad.stderr, "before the next question"


# --- what is found ----------------------------------------------------------------------------------------------------


def ollama(method: str, path: str, headers: object, body: bytes) -> tuple[int, str, bytes]:
    return 200, "application/json", b'{"models": [{"name": "llama3.2"}]}' if path == "/api/tags" else b"{}"


def test_it_finds_ollama_keys_programs_and_the_configured_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("nvidia-smi", "echo 'H200 (a)'; echo H200"), ("docker", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with serving(ollama) as url:
        env = {"OLLAMA_HOST": url.removeprefix("http://"), "OPENAI_API_KEY": "x", "TENTALIS_BOOTSTRAP": "kafka:9092"}
        assert look_around(env) == Machine(
            "kafka:9092", ("H200 (a)", "H200"), False, url, ("llama3.2",), ("OPENAI_API_KEY",)
        )
    monkeypatch.setenv("PATH", "")
    nothing = look_around({"OLLAMA_HOST": "127.0.0.1:1"})
    assert (nothing.gpus, nothing.docker, nothing.ollama) == ((), False, None)
