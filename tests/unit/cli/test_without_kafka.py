"""Commands whose Kafka does not answer, and what is refused before Kafka is asked."""

from pathlib import Path
from typing import Never

import pytest
from typer.testing import CliRunner

from tentalis.cli.main import app
from tentalis.kafka import preflight
from tentalis.kafka.errors import Unreachable, unreachable
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tests.support.commands import LEAVES, options

runner = CliRunner()
ADDRESS = "kafka.nowhere:9092"
ARGUMENTS = {
    "attachments get": "t a --into new",
    "consume": "tentalis.tasks.v1",
    "dlq drop": "tentalis.tasks.v1.dlq[0]@1 --reason r",
    "dlq replay": "tentalis.tasks.v1.dlq[0]@1",
    "dlq show": "tentalis.tasks.v1.dlq[0]@1",
    "forget": "--session s",
    "groups delete": "g",
    "groups reset-offsets": "tentalis-join --to-earliest",
    "groups skip": "tentalis-join --to 3 --topic tentalis.halves.v1 --partition 0 --reason r",
    "import": ".",
    "manager": "--run r",
    "policy assign": "w p@v1",
    "policy compare": "p p@v2",
    "policy diff": "p p@v2",
    "policy export": "p@v1 --format gguf --to new",
    "policy pin": "p@v1",
    "policy promote": "p@v1",
    "policy rollback": "p",
    "policy show": "p",
    "produce": "tentalis.tasks.v1",
    "replay": "r",
    "rollouts query": "SELECT",
    "serve experience": "--server http://127.0.0.1:9 --hinters hinters.yaml",
    "serve gateway": "--server http://127.0.0.1:9",
    "serve hinting": "--server http://127.0.0.1:9",
    "serve policies": "--server http://127.0.0.1:9",
    "sessions label": "s 1 --score 1",
    "state rebuild": "join",
    "topics delete": "t",
    "topics repartition": "--partitions 8",
    "topics trim": "tentalis.tasks.v1 --before 1h",
    "worker": "--server http://127.0.0.1:9",
}
"""What a command needs; else a word for each of its arguments."""
WITHOUT = {"doctor", "init", "rescore", "topics acls", "topics wait", "train"}
"""Commands that need files, that tell of Kafka after other things, or that wait for it until their time is over."""
COMMANDS = sorted(name for name, command in LEAVES.items() if "--bootstrap-server" in options(command))


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses that were asked: none answers."""
    asked: list[str] = []

    def connect(settings: Settings, timeout: float = 0.0) -> Never:
        asked.append(str(settings.bootstrap))
        raise Unreachable(unreachable(settings, "Connection refused", timeout))

    monkeypatch.setattr(preflight, "connect", connect)
    monkeypatch.chdir(tmp_path)
    Path("hinters.yaml").write_text("hinters: {'*': {kind: rule}}\n", encoding="utf-8")
    return asked


def words(name: str) -> list[str]:
    if name in ARGUMENTS:
        return [*name.split(), *ARGUMENTS[name].split()]
    needed = [each for each in LEAVES[name].params if each.param_type_name == "argument" and each.required]
    return [*name.split(), *("x" for _ in needed)]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in WITHOUT])
def test_a_command_names_the_kafka_that_does_not_answer(name: str, unanswered: list[str]) -> None:
    yes = ["--yes"] if "--yes" in options(LEAVES[name]) else []
    done = runner.invoke(app, [*words(name), *yes, "--bootstrap-server", ADDRESS], input="")
    assert done.exit_code == ExitCode.UNREACHABLE, done.stderr
    assert (unanswered, done.stdout) == ([ADDRESS], "")
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert ADDRESS in error and "tentalis up" in error and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("consume t --from nonsense", "nonsense"),
        ("consume t --to 1:2", "1:2"),
        ("consume t --count 0", "'--count'"),
        ("consume t --filter (", "--filter"),
        ("dlq list --since nonsense", "--since"),
        ("dlq show nonsense", "nonsense"),
        ("groups reset-offsets g --to-time nonsense", "--to-time"),
        ("groups skip g --to nonsense --topic t --partition 0 --reason r", "'--to'"),
        ("forget --before nonsense", "--before"),
        ("policy assign w p@3", "'p@3' is not a version: write POLICY@vN"),
        ("policy assign w p@v3 --instead-of p@v1", "--instead-of p@v1: name a policy"),
        ("policy compare p@v1 p@", "'p@' is not a version: write POLICY@vN"),
        ("policy compare p@v1 p@v2 --since nonsense", "--since"),
        ("policy diff p@1 p@v2", "'p@1' is not a version: write POLICY@vN"),
        ("policy pin p@v", "'p@v' is not a version: write POLICY@vN"),
        ("policy promote @v1", "'@v1' is not a version: write POLICY@vN"),
        ("policy rollback p@v-1 --yes", "'p@v-1' is not a version: write POLICY@vN"),
        ("policy show p@latest", "'p@latest' is not a version: write POLICY@vN"),
        ("policy export p@x --format gguf --to new", "'p@x' is not a version: write POLICY@vN"),
        ("produce tentalis.tasks.v1 --file absent.jsonl", "absent.jsonl"),
        ("replay r --set nonsense", "--set nonsense"),
        ("replay r --set =1", "--set =1"),
        ("replay r --to-step -1", "'--to-step'"),
        ("rollouts list --since nonsense", "--since"),
        ("serve gateway --server nonsense", "url of the form http://host:port"),
        ("serve gateway --config hinters.yaml", "hinters.yaml: backends: Field required"),
        ("sessions list --since nonsense", "--since"),
        ("sessions label s one", "'turn'"),
        ("topics trim t --before nonsense", "--before"),
        ("topics list --bootstrap-server host:port", "--bootstrap-server host:port"),
        ("topics produce-rate t --over nonsense", "--over"),
        ("verify r --wait nonsense", "'--wait'"),
    ],
)
def test_a_value_of_a_wrong_form_is_refused_before_kafka_is_asked(line: str, wrong: str, unanswered: list[str]) -> None:
    done = runner.invoke(app, line.split(), env={"TENTALIS_BOOTSTRAP": ADDRESS}, input="")
    assert (done.exit_code, unanswered) == (ExitCode.USAGE, []), done.stderr
    assert wrong in done.stderr
