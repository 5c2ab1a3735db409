"""Settings that are wrong, and what is in the way of a start."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from tests.drill.bench import Bench
from tests.drill.fault import Sight, fault

START = "does-not-start.md"
PROFILES = "profiles.md"
NAMESPACES = "namespaces.md"
CLUSTER = "in-a-cluster.md"


@contextmanager
def variables(bench: Bench, **values: str) -> Iterator[None]:
    """Sets variables of the shell for the block; an empty value unsets one."""
    before = dict(bench.shell.env)
    bench.shell.env.update(values)
    for name in [name for name, value in values.items() if not value]:
        del bench.shell.env[name]
    try:
        yield
    finally:
        bench.shell.env.clear()
        bench.shell.env.update(before)


@fault("bench", START, code=2, says="TENTALIS_MARKER_TTL=abc")
def a_bad_value(bench: Bench) -> Iterator[Sight]:
    with variables(bench, TENTALIS_MARKER_TTL="abc"):
        sight = bench.shell.run("tentalis up")
    yield sight


@fault("bench", START, code=2, says="TENTALIS_METRICS_PORT=99999")
def a_port_that_is_none(bench: Bench) -> Iterator[Sight]:
    with variables(bench, TENTALIS_METRICS_PORT="99999"):
        sight = bench.shell.run("tentalis serve join")
    yield sight


@fault("bench", START, code=0, says="TENTALIS_MARKER_TLL")
def a_misspelt_variable(bench: Bench) -> Iterator[Sight]:
    with variables(bench, TENTALIS_MARKER_TLL="7200"):
        sight = bench.shell.run("tentalis topics list")
    yield sight


@fault("bench", START, code=1, says="is taken by")
def a_taken_port(bench: Bench) -> Iterator[Sight]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        bench.shell.env["PORT"] = str(holder.getsockname()[1])
        sight = bench.shell.run("tentalis serve join --metrics-port $PORT")
    yield sight


@fault("bench", START, code=4, says="no Kafka answers on 127.0.0.1:1")
def a_wrong_address(bench: Bench) -> Iterator[Sight]:
    with variables(bench, TENTALIS_BOOTSTRAP="127.0.0.1:1"):
        sight = bench.shell.run("tentalis topics list")
    yield sight


@fault("bench", START, code=4, says="no Kafka is known")
def no_address(bench: Bench) -> Iterator[Sight]:
    with variables(bench, TENTALIS_BOOTSTRAP=""):
        sight = bench.shell.run("tentalis topics list")
    yield sight


@fault("bench", START, code=2, says="batch_rolouts")
def a_misspelt_training_setting(bench: Bench) -> Iterator[Sight]:
    (bench.folder / "run.yaml").write_text(
        "{run_id: r, policy: p, base_model: m, base_model_name: m, batch_rolouts: 8}\n", encoding="utf-8"
    )
    yield bench.shell.run("tentalis train --config run.yaml")


@fault("bench", START, code=1, says="another stack works on Kafka")
def another_stack_on_this_kafka(bench: Bench) -> Iterator[Sight]:
    """The applications of this site are members of the groups that a stack would use."""
    yield bench.shell.run("tentalis up --policy-model nothing")


@fault("bench", PROFILES, code=2, says="Did you mean bootstrap?")
def an_unknown_key_in_the_settings_file(bench: Bench) -> Iterator[Sight]:
    file = bench.folder / "settings.yaml"
    file.write_text(
        f"profiles:\n  staging:\n    bootstrapp: 127.0.0.1:1\n  production:\n    bootstrap: {bench.broker.bootstrap}\n",
        encoding="utf-8",
    )
    bench.shell.env["SETTINGS"] = str(file)
    with variables(bench, TENTALIS_CONFIG=str(file)):
        sight = bench.shell.run("tentalis topics list")
    yield sight


@fault("bench", CLUSTER, code=4, says="TENTALIS_BOOTSTRAP of the environment takes precedence over")
def a_variable_beside_a_profile(bench: Bench) -> Iterator[Sight]:
    """An operator names a profile in a shell that names another Kafka."""
    file = bench.folder / "clusters.yaml"
    file.write_text(f"profiles:\n  production:\n    bootstrap: {bench.broker.bootstrap}\n", encoding="utf-8")
    bench.shell.env["SETTINGS"] = str(file)
    with variables(bench, TENTALIS_BOOTSTRAP="127.0.0.1:1", TENTALIS_CONFIG=str(file)):
        sight = bench.shell.run("tentalis --profile production groups lag")
    yield sight


@fault("bench", NAMESPACES, code=2, says="without 'tentalis' in it")
def a_bad_namespace(bench: Bench) -> Iterator[Sight]:
    with variables(bench, TENTALIS_NAMESPACE="tentalis.staging"):
        sight = bench.shell.run("tentalis topics list")
    yield sight
