"""The processes of the local stack."""

from pathlib import Path
from typing import Any

import pytest

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.settings import DEFAULT_GATEWAY, gateway_url
from tentalis.cli.up import _of_unfinished, scales
from tentalis.kafka import topology
from tentalis.local.spec import ProcessSpec, in_order
from tentalis.local.stack import StackOptions, build_stack
from tentalis.local.state import StateDir
from tentalis.service import variables
from tentalis.service.settings import Settings
from tentalis.service.variable import Variable


def test_a_gateway_comes_with_what_links_its_turns(tmp_path: Path) -> None:
    def names(gateway: str | None) -> set[str]:
        with StateDir(tmp_path) as state:
            options = StackOptions(
                state, Settings(home=tmp_path), model=tmp_path, trainer_config=tmp_path / "run.yaml", gateway=gateway
            )
            return {spec.name for spec in in_order(build_stack(options).specs)}

    assert names("assistant") - names(None) == {"gateway", "sessions"}


@pytest.mark.parametrize("free", [True, False])
def test_a_gateway_has_the_port_that_its_documentation_names_unless_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: bool
) -> None:
    monkeypatch.setattr("tentalis.local.state.port_is_free", lambda port: free or port != 8200)
    with StateDir(tmp_path) as state:
        options = StackOptions(
            state, Settings(home=tmp_path), model=tmp_path, trainer_config=tmp_path / "run.yaml", gateway="assistant"
        )
        stack = build_stack(options)
    (spec,) = [spec for spec in stack.specs if spec.name == "gateway"]
    assert (spec.port == 8200) is free
    assert "--wait-for-versions" in spec.argv
    assert stack.gateway == f"http://127.0.0.1:{spec.port}" and gateway_url(None, tmp_path) == DEFAULT_GATEWAY
    (worker,) = [spec for spec in stack.specs if spec.name == "worker"]
    assert worker.env[variables.URL.name] == stack.gateway, "programs call it, whatever the variable is outside"


def test_all_processes_have_the_file_of_environments_and_the_worker_its_arguments(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        options = StackOptions(
            state,
            Settings(home=tmp_path),
            model=tmp_path,
            trainer_config=tmp_path / "run.yaml",
            environment="capitals",
            environment_file=tmp_path / "environments.yaml",
            worker=("--allow-unsandboxed",),
        )
        found = {spec.name: spec for spec in build_stack(options).specs}
    assert {spec.env[variables.ENVIRONMENT_FILE.name] for spec in found.values()} == {f"{tmp_path}/environments.yaml"}
    worker = found["worker"].argv
    assert worker[worker.index("--environment") + 1] == "capitals" and "--allow-unsandboxed" in worker


def test_vllm_takes_the_place_of_the_model_server(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        options = StackOptions(
            state,
            Settings(home=tmp_path),
            model=tmp_path,
            trainer_config=tmp_path / "run.yaml",
            vllm=("--max-rank", "16"),
        )
        found = {spec.name: spec for spec in in_order(build_stack(options).specs)}
    model, policies = found["model"].argv, found["policies"].argv
    assert list(model[3:5]) == ["serve", "vllm"] and model[model.index("--max-rank") + 1] == "16"
    assert policies[policies.index("--dtype") + 1] in ("float32", "bfloat16"), "vLLM does not declare its precision"
    assert found["model"].ready_timeout > ProcessSpec.ready_timeout


def test_a_scaled_application_has_processes_with_names_ports_and_ids_of_their_own(tmp_path: Path) -> None:
    def specs() -> dict[str, ProcessSpec]:
        with StateDir(tmp_path) as state:
            options = StackOptions(
                state,
                Settings(home=tmp_path),
                model=tmp_path,
                trainer_config=tmp_path / "run.yaml",
                scale={"scoring": 3, "worker": 2},
            )
            return {spec.name: spec for spec in in_order(build_stack(options).specs)}

    found = specs()
    assert {"scoring", "scoring-2", "scoring-3", "worker", "worker-2"} <= found.keys() and "join-2" not in found
    assert len({spec.port for spec in found.values() if spec.port}) == len([s for s in found.values() if s.port])
    assert {name: spec.port for name, spec in specs().items()} == {name: spec.port for name, spec in found.items()}
    folders = [
        spec.argv[spec.argv.index("--state-dir") + 1]
        for name, spec in found.items()
        if name in ("scoring-2", "scoring-3")
    ]
    assert len(set(folders)) == 2 and "--state-dir" not in found["scoring"].argv
    assert found["worker-2"].argv[found["worker-2"].argv.index("--worker-id") + 1].endswith("-chat-2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("broker=2", "can scale"),
        ("trainer=2", "--ranks"),
        ("model=2", "can scale"),
        ("gateway=2", "can scale"),
        ("sessions=2", "can scale"),
        ("scoring=0", "at least 1"),
        ("scoring", "NAME=N"),
        ("scoring=999", "partitions"),
    ],
)
def test_what_cannot_scale_is_refused(given: str, said: str) -> None:
    with pytest.raises(CommandError, match=said) as caught:
        scales([given], gateway=False)
    assert caught.value.code == 2


def test_streams_and_workers_scale_up_to_their_partitions() -> None:
    assert scales(["scoring=2", "worker=3"], gateway=False) == {"scoring": 2, "worker": 3}
    assert scales(["sessions=2"], gateway=True) == {"sessions": 2}
    for application in topology.APPLICATIONS:
        assert topology.most_processes(application) > 1 or not application.scales, application.name


def test_a_stack_that_joins_another_one_has_a_server_of_its_own_and_no_trainer(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, bootstrap="kafka:9092")

    def commands(**more: Any) -> dict[str, list[str]]:
        with StateDir(tmp_path) as state:
            options = StackOptions(state, settings, model=tmp_path, trainer_config=tmp_path / "run.yaml", **more)
            return {spec.name: [*spec.argv] for spec in build_stack(options).specs}

    alone, joined = commands(gateway="assistant"), commands(gateway="assistant", server_id="host-1", joins=True)
    assert alone.keys() - joined.keys() == {"trainer"} and not joined.keys() - alone.keys()
    for name in ("policies", "worker", "gateway"):
        for found, server in ((alone, "local"), (joined, "host-1")):
            assert found[name][found[name].index("--server-id") + 1] == server
    assert [found["policies"][found["policies"].index("--promotion") + 1] for found in (alone, joined)] == [
        "run",
        "none",
    ]
    assert "--worker-id" not in alone["worker"], "the worker of a stack alone keeps its default id"
    more = commands(server_id="host-1", joins=True, scale={"worker": 2})
    workers = [argv[argv.index("--worker-id") + 1] for argv in (joined["worker"], more["worker"], more["worker-2"])]
    assert workers == ["host-1-chat", "host-1-chat", "host-1-chat-2"]


def test_a_stack_scores_by_a_file_and_leaves_out_what_nobody_needs(tmp_path: Path) -> None:
    def commands(**more: Any) -> dict[str, list[str]]:
        settings = Settings(home=tmp_path, bootstrap="kafka:9092")
        with StateDir(tmp_path) as state:
            options = StackOptions(state, settings, model=tmp_path, trainer_config=tmp_path / "run.yaml", **more)
            return {spec.name: [*spec.argv] for spec in build_stack(options).specs}

    plain = commands()
    found = commands(scorers=tmp_path / "s.yaml", without=frozenset({"hinting"}), scale={"scoring": 2})
    assert plain.keys() - found.keys() == {"hinting"} and found.keys() - plain.keys() == {"scoring-2"}
    for name in ("scoring", "scoring-2"):
        assert found[name][found[name].index("--scorers") + 1] == str(tmp_path / "s.yaml")
    assert "--state-dir" in found["scoring-2"] and "--state-dir" not in found["scoring"]
    assert not any("--scorers" in command for name, command in found.items() if not name.startswith("scoring"))
    assert not any("--scorers" in command for command in plain.values())


@pytest.mark.parametrize(("name", "variable"), [("scorers", variables.SCORERS), ("hinters", variables.HINTERS)])
def test_the_standing_stack_goes_on_with_the_files_of_an_unfinished_run_of_learn(
    name: str, variable: Variable[Path | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    config, file = tmp_path / "config.yaml", tmp_path / f"{name}.yaml"
    assert _of_unfinished(config, file.name, variable) is None
    file.touch()
    assert _of_unfinished(config, file.name, variable) == file
    monkeypatch.setenv(variable.name, str(file))
    assert _of_unfinished(config, file.name, variable) is None
    monkeypatch.delenv(variable.name)
    (tmp_path / "finished").touch()
    assert _of_unfinished(config, file.name, variable) is None
