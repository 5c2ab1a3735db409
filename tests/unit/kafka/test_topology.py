"""One list of applications: everything that knows of an application derives it from there."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from schemas import topics
from schemas.wire.codec import Codec
from streams.apps.aggregation.processor import Aggregation
from streams.apps.experience.processor import Experience
from streams.apps.hinting.processor import Hinting
from streams.apps.join.processor import JoinProcessor
from streams.apps.scoring.processor import Scoring
from streams.apps.sessions.processor import SessionsProcessor
from streams.runtime.metrics import STREAM_RECORDS
from streams.runtime.processor import Processor
from tentalis.cli.main import app
from tentalis.cli.serve import plain_streams
from tentalis.cli.shared.metrics_page import exported_by
from tentalis.gateway.api.groups import components, read_by
from tentalis.kafka import acls, topology
from tentalis.kafka.acls import Grant, Operation, Resource
from tentalis.kafka.admin import plan
from tentalis.kafka.lag import groups_of
from tentalis.kafka.topology import APPLICATIONS, InStack, named
from tentalis.local.spec import in_order
from tentalis.local.stack import StackOptions, build_stack
from tentalis.local.state import StateDir
from tentalis.ops import doctor
from tentalis.ops.forget import process as forgetting
from tentalis.service.settings import Settings
from trainer.distributed.consumer_group import consumer_group

NEW = topology.stream(
    "praising",
    "Praises whoever said something.",
    consumes=(topics.SESSIONS, topics.ROLLOUTS),
    produces=(topics.FEEDBACK,),
    dead_letters=(),
    table="praise",
    personal=True,
)
CHANGELOG = "tentalis-praising-praise-changelog"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list with one application more, and nothing else changed."""
    monkeypatch.setattr(topology, "APPLICATIONS", (*APPLICATIONS, NEW))


def options(state: StateDir, home: Path, **more: Any) -> StackOptions:
    return StackOptions(state, Settings(home=home), model=home, trainer_config=home / "run.yaml", **more)


@pytest.mark.usefixtures("added")
class TestAnApplicationAddedToTheList:
    def test_a_new_application_has_a_role_with_the_acls_that_it_needs(self) -> None:
        role = acls.roles()["praising"]
        assert role.what == "`tentalis serve praising`"
        assert set(role.grants) >= {
            Grant(Resource.GROUP, "tentalis-praising", Operation.READ),
            Grant(Resource.TOPIC, topics.SESSIONS, Operation.READ),
            Grant(Resource.TOPIC, topics.dlq(topics.SESSIONS), Operation.READ),
            Grant(Resource.TOPIC, topics.FEEDBACK, Operation.WRITE),
            Grant(Resource.TOPIC, CHANGELOG, Operation.READ),
            Grant(Resource.TOPIC, CHANGELOG, Operation.WRITE),
        }

    def test_a_new_application_is_in_the_lag_tables(self) -> None:
        assert groups_of("chat", "assistant")["tentalis-praising"] == NEW.consumes
        assert read_by("tentalis-praising") == NEW.consumes
        assert components()["praising"] == "tentalis-praising"

    def test_a_new_application_is_a_process_of_the_local_stack(self, tmp_path: Path) -> None:
        with StateDir(tmp_path) as state:
            (spec,) = [each for each in build_stack(options(state, tmp_path)).specs if each.name == "praising"]
        assert list(spec.argv)[3:5] == ["serve", "praising"] and spec.after == ("topics",)
        assert list(spec.argv)[5:] == ["--metrics-port", str(spec.port)] and spec.ready is not None

    def test_forget_reaches_a_new_application(self) -> None:
        assert NEW in topology.personal()[topics.SESSIONS]
        assert topics.ROLLOUTS not in topology.personal(), "rollouts carry no request"
        assert CHANGELOG in forgetting.personal_changelogs()

    def test_a_new_application_has_its_changelog_in_the_topic_table(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert CHANGELOG in {change.topic for change in plan(topology.topic_table(), {})}
        looked: set[str] = set()

        class Admin:
            def __init__(self, settings: Settings) -> None: ...

            def current(self, names: Any) -> dict[str, Any]:
                looked.update(names)
                return {}

        monkeypatch.setattr("tentalis.kafka.preflight.connect", lambda settings, timeout: None)
        monkeypatch.setattr("tentalis.kafka.admin.KafkaAdmin", Admin)
        monkeypatch.setattr("tentalis.kafka.admin.missing_schemas", lambda settings: [])
        monkeypatch.setattr("tentalis.kafka.topic_id_log.unrecorded_topics", lambda settings: [])
        *_, finding = doctor.broker(Settings(home=tmp_path, bootstrap="nowhere:1"))
        assert CHANGELOG in looked
        assert finding.found.startswith(f"{len(topology.topic_table().topics)} differ")

    def test_a_new_application_is_a_command_of_serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun: list[tuple[Any, ...]] = []
        module = ModuleType("streams.apps.praising.processor")
        module.build = lambda settings: "praise"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(
            plain_streams, "run_stream", lambda name, build, **given: begun.append((name, build(None), given))
        )
        serve = typer.Typer()
        plain_streams.add_plain_streams(serve)
        done = CliRunner().invoke(serve, ["praising", "--metrics-port", "9", "--instance", "i"])
        assert done.exit_code == 0, done.output
        assert [each[:2] for each in begun] == [("praising", "praise")]
        assert begun[0][2] == {
            "bootstrap": None,
            "port": 9,
            "instance": "i",
            "state": "memory",
            "state_dir": None,
            "accept_loss": False,
        }

    def test_a_new_application_exports_the_metrics_of_every_stream_application(self) -> None:
        assert STREAM_RECORDS in exported_by("praising")


# --- the list and the code --------------------------------------------------------------------------------------------


def built() -> dict[str, Processor]:
    codec, nobody = Codec(None), cast(Any, None)
    made: tuple[Processor, ...] = (
        *(SessionsProcessor(codec), Scoring(codec), Hinting(codec, nobody), JoinProcessor(codec), Aggregation(codec)),
        Experience(codec, nobody, nobody, nobody, nobody, idle_ms=1),
    )
    return {processor.app_id: processor for processor in made}


def test_the_list_has_the_stream_applications_that_there_are() -> None:
    processors = built()
    assert processors.keys() == {each.app_id for each in topology.streams()}
    for each in topology.streams():
        processor = processors[each.app_id]
        assert set(processor.topics) <= set(each.consumes), each.name
        assert {processor.table} <= {*each.tables, None}, each.name
        assert each.group == each.app_id, "the runtime takes one for the other"


@pytest.mark.parametrize("name", ["aggregation", "experience", "join", "sessions"])
def test_an_application_reads_all_that_the_list_says(name: str) -> None:
    """Scoring and hinting read less if they keep nothing, which these tests build."""
    processor = built()[named(name).app_id]
    assert (processor.topics, (processor.table,)) == (named(name).consumes, named(name).tables)


def test_each_application_can_be_started_and_nothing_else_can_be_served() -> None:
    commands = {name: command for name, command in subcommands(app).items() if name != "serve"}
    serve = subcommands(app)["serve"].commands
    known = {each.command: each for each in APPLICATIONS}
    # A stand-in for the application model, and a server that has nothing to do with the log.
    others = {("serve", "vllm"), ("serve", "env-pool")}
    assert {("serve", name) for name in serve} - others == {command for command in known if command[0] == "serve"}
    for command, each in known.items():
        found = serve[command[1]] if command[0] == "serve" else commands[command[0]]
        options = {option: parameter for parameter in found.params for option in parameter.opts}
        assert "--metrics-port" in options or each.port is not None, each.name
        assert each.port is None or options["--port"].default == each.port


def subcommands(of: typer.Typer) -> dict[str, Any]:
    return dict(cast(Any, typer.main.get_command(of)).commands)


def test_the_list_names_topics_that_there_are() -> None:
    known = topics.table().topics
    for each in APPLICATIONS:
        assert {*each.consumes, *each.reads, *each.produces, *map(topics.dlq, each.dead_letters)} <= set(known)
        assert set(each.dead_letters) <= set(each.consumes), each.name
        assert not each.personal or any(each in applications for applications in topology.personal().values())


# --- what derives from it ---------------------------------------------------------------------------------------------


def test_experience_is_in_the_lag_tables() -> None:
    assert groups_of("chat", "assistant")["tentalis-experience"] == (topics.SESSIONS,)
    assert read_by("tentalis-experience") == (topics.SESSIONS,)
    assert components()["experience"] == "tentalis-experience"


def test_the_pipeline_has_each_application_after_those_whose_records_it_reads() -> None:
    names = [each.name for each in topology.pipeline()]
    assert set(names) == {*(each.name for each in topology.streams()), "worker", "trainer"}
    for before, after in (("sessions", "worker"), ("worker", "scoring"), ("experience", "join"), ("join", "trainer")):
        assert names.index(before) < names.index(after)
    assert list(groups_of("chat", "assistant", {"join", "worker"})) == ["tentalis-worker-chat", "tentalis-join"]


def test_a_circle_of_applications_has_an_order_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rewards what the join makes with feedback, which scoring turns into halves for the join."""
    monkeypatch.setattr(topology, "APPLICATIONS", (*APPLICATIONS, NEW))
    assert [each.name for each in topology.pipeline()][:3] == ["sessions", "experience", "worker"]
    assert {each.name for each in topology.pipeline()} >= {"scoring", "join", "praising"}


def test_a_group_belongs_to_the_application_that_names_it() -> None:
    assert read_by("tentalis-worker-chat") == read_by("tentalis-worker-chat-w1") == (topics.TASKS,)
    assert consumer_group("assistant") == "tentalis-trainer-assistant" and read_by(consumer_group("assistant")) == (
        topics.ROLLOUTS,
    )
    assert read_by(topology.CONTROL_GROUP) == read_by("tentalis-joiner") == read_by("tentalis-reader") == ()


def test_the_import_contract_keeps_every_stream_application_apart() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (apart,) = [each["modules"] for each in contracts if each["type"] == "independence"]
    assert set(apart) == {f"streams.apps.{each.name}" for each in topology.streams()}


def test_forget_waits_for_those_who_hold_what_people_said() -> None:
    found = {topic: [each.name for each in applications] for topic, applications in topology.personal().items()}
    assert found == {topics.HALVES: ["join"], topics.SESSIONS: ["sessions", "experience"]}
    assert [each.name for each in topology.streams() if each.optional] == ["experience"]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="no application nobody; there are sessions, scoring"):
        named("nobody")


def test_the_stack_starts_what_it_is_asked_for(tmp_path: Path) -> None:
    def started(**more: Any) -> set[str]:
        with StateDir(tmp_path) as state:
            return {spec.name for spec in in_order(build_stack(options(state, tmp_path, **more)).specs)}

    always = started()
    assert always == {"broker", "topics", *(a.name for a in APPLICATIONS if a.in_stack is InStack.ALWAYS)}
    assert started(gateway="assistant") - always == {"gateway", "sessions"}
    assert started(manager=("--run", "r")) - always == {"manager"}
