"""The connections that the network policies of a release allow, both sides of each, against what the roles need."""

from functools import cache

import yaml

from tests.unit.helm import chart
from tests.unit.helm.chart import Manifest

TRIAL = ("-f", str(chart.CHART / "ci" / "trial-values.yaml"), "--set", "networkPolicy.enabled=true")
COMMANDS = ("topics", "test")


@cache
def manifests() -> tuple[Manifest, ...]:
    done = chart.template(*TRIAL)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)


def component(labels: dict[str, str]) -> str:
    return labels["app.kubernetes.io/component"]


def selected(rule: Manifest, side: str, labels: dict[str, str]) -> bool:
    """True if the peers of a rule have a pod; a rule without peers has all."""
    peers = rule.get(side)
    return not peers or any(
        peer.get("podSelector", {}).get("matchLabels", {}).items() <= labels.items() for peer in peers
    )


def opens(rule: Manifest, name: str, number: int) -> bool:
    """True if a rule has a port, by its name or number; a rule without ports has all."""
    return not rule.get("ports") or any(port["port"] in (name, number) for port in rule["ports"])


def servers() -> dict[str, Manifest]:
    """The workloads of the release by component, its Kafka included."""
    found = chart.of_kind(manifests(), "Deployment", "StatefulSet", "Job")
    named = {component(each["spec"]["template"]["metadata"]["labels"]): each for each in found}
    return {name: each for name, each in named.items() if name not in COMMANDS}


def ports_of(name: str) -> dict[str, int]:
    ports = chart.container(servers()[name]).get("ports", [])
    return {port["name"]: port["containerPort"] for port in ports}


def policies() -> dict[str, Manifest]:
    found = [each["spec"] for each in chart.of_kind(manifests(), "NetworkPolicy")]
    return {component(spec["podSelector"]["matchLabels"]): dict(spec) for spec in found}


def allowed() -> set[tuple[str, str, str]]:
    """The connections (source, target, port) between roles that egress of the one and ingress of the other allow."""
    found = policies()
    return {
        (source, target, name)
        for source, out in found.items()
        for target, into in found.items()
        if source != target and target in servers()
        for name, number in ports_of(target).items()
        if any(
            selected(rule, "to", into["podSelector"]["matchLabels"]) and opens(rule, name, number)
            for rule in out["egress"]
        )
        and any(
            selected(rule, "from", out["podSelector"]["matchLabels"]) and opens(rule, name, number)
            for rule in into["ingress"]
        )
    }


def test_every_workload_has_a_policy_that_selects_it() -> None:
    found = policies()
    assert set(found) == {*servers(), *COMMANDS}
    for name, workload in servers().items():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert found[name]["podSelector"]["matchLabels"].items() <= labels.items()


def test_roles_reach_kafka_and_the_model_server_and_nothing_else_of_the_release() -> None:
    roles = {name for name in policies() if name not in ("kafka", "model")}
    asks = {
        name
        for name, workload in servers().items()
        if any(str(word).startswith("--server") and "--server-id" not in str(word) for word in arguments(workload))
    }
    assert allowed() == {(name, "kafka", "kafka") for name in roles} | {(name, "model", "http") for name in asks}


def arguments(workload: Manifest) -> list[str]:
    """The arguments of a workload, and the variables that stand for some of them."""
    found = chart.container(workload)
    named = {"TENTALIS_SERVER": "--server"}
    return [*found.get("args", []), *(named.get(each["name"], "") for each in found.get("env", []))]
