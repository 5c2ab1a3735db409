"""The chart follows from the product: its applications, commands, ACLs, settings, metrics and runbooks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from helm import generate, readme
from schemas import namespace
from streams.runtime.worker import StreamSettings
from tentalis.cli.main import app
from tentalis.cli.shared.metrics_page import catalogue
from tentalis.gateway.settings import GatewaySettings
from tentalis.kafka import acls, topology
from tentalis.kafka.topology import APPLICATIONS
from tentalis.opd.config import load_hinters
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.rewards.scorer_file import load_scorers
from tentalis.service import variables
from tentalis.service.metrics import MetricKind
from tests.support import ROOT
from tests.unit.helm import chart
from tests.unit.helm.chart import CHART, VALUES, Manifest, container, rendered, set_of, workloads
from tests.unit.helm.test_rendered import values_id
from trainer.config.file import load_config

RUNBOOKS = ROOT / "docs" / "operations" / "runbooks"
ALERTS = [
    rule
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
METRICS = {metric.name: metric for metric in catalogue()}
SERIES = {
    **METRICS,
    **{
        f"{name}{end}": metric
        for name, metric in METRICS.items()
        if metric.kind is MetricKind.HISTOGRAM
        for end in ("_bucket", "_sum", "_count")
    },
}
FUNCTIONS = {
    *("sum", "max", "by", "rate", "increase", "changes", "time", "and", "or", "histogram_quantile"),
}
PRODUCED_LABELS = {"le", "app", "pod"}


def test_generated_files_are_up_to_date() -> None:
    stale = [path for path, text in generate.files().items() if path.read_text("utf-8") != text]
    assert stale == [], "run `make chart`"


def test_every_application_of_the_topology_can_run(tmp_path: Path) -> None:
    roles = {chart.role_of(each) for values in VALUES for each in workloads(rendered(values)).values()}
    assert roles == {each.name for each in APPLICATIONS}


def test_a_new_application_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    new = topology.stream("praising", "Praises.", consumes=("tentalis.feedback.v1",), produces=(), dead_letters=())
    monkeypatch.setattr(topology, "APPLICATIONS", (*APPLICATIONS, new))
    monkeypatch.setattr(acls, "ROLES", acls.roles())
    monkeypatch.setattr(generate, "command_options", lambda application: {"--instance", "--metrics-port", "--state"})
    entry = yaml.safe_load(generate.topology_file())["roles"]["praising"]
    assert entry["command"] == ["serve", "praising"] and entry["stream"] and entry["mostReplicas"] == 8
    assert "praising" in generate.schema_file()
    assert "tentalis-praising-state-changelog" in generate.topology_file()


COMMANDS: Any = typer.main.get_command(app)


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Returns the options of a command line as the product's own parser reads them. Raises for unknown ones."""
    command = COMMANDS
    names = []
    while hasattr(command, "commands"):
        names.append(arguments[0])
        command, arguments = command.commands[arguments[0]], arguments[1:]
    context = command.make_context(" ".join(names), list(arguments))
    return dict(context.params)


def mounted(manifests: tuple[Manifest, ...], workload: Manifest, folder: Path) -> dict[str, Path]:
    """Writes the files that a workload mounts from ConfigMaps; returns them by their path in the container."""
    paths = {each["name"]: each["mountPath"] for each in container(workload)["volumeMounts"]}
    found = {}
    for volume in workload["spec"]["template"]["spec"]["volumes"]:
        if "configMap" in volume:
            content = chart.named(manifests, "ConfigMap", volume["configMap"]["name"])["data"]
            for name, text in content.items():
                file = folder / f"{volume['configMap']['name']}-{name}"
                file.write_text(text, encoding="utf-8")
                found[f"{paths[volume['name']]}/{name}"] = file
    return found


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_every_process_is_started_with_options_and_variables_that_it_has(
    values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = rendered(values)
    for component, workload in workloads(manifests).items():
        files = mounted(manifests, workload, tmp_path)
        found = container(workload)
        env = {each["name"]: each.get("value", "") for each in found["env"]}
        arguments = [str(files.get(each, each)) for each in found["args"]]
        ours = {name: value for name, value in env.items() if name.startswith("TENTALIS_")}
        assert ours.keys() <= variables.NAMES, component
        with monkeypatch.context() as patch:
            for name, value in ours.items():
                patch.setenv(name, str(files.get(value, value)))
            options = parsed(arguments)
        port = options.get("port")
        ports = {each["name"]: each["containerPort"] for each in found["ports"]}
        application = topology.named(chart.role_of(workload) or "")
        assert port == ports["metrics" if application.port is None else "http"]
        if application.stream:
            assert options["instance"] == "$(POD_NAMESPACE).$(POD_NAME)"
            assert env["TENTALIS_STATE"] in StreamSettings.__annotations__["state"].__args__


@pytest.mark.parametrize("name", ["minimal", "trial"])
def test_containers_that_prepare_run_commands_of_the_product(name: str) -> None:
    commands = set()
    for _, pod in chart.pods(set_of(name)):
        for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            if each["name"] in ("wait-for-topics", "wait-for-kafka", "topics"):
                parsed(each["args"])
                commands.add(tuple(each["args"][:2]))
    assert commands == {("topics", "apply"), ("topics", "wait")}


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_the_product_reads_every_configuration_file(
    values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    for environment, scorers in ENVIRONMENTS.items():  # what the files register ends with the test
        monkeypatch.setitem(ENVIRONMENTS, environment, dict(scorers))
    manifests = rendered(values)
    for component, workload in workloads(manifests).items():
        files = mounted(manifests, workload, tmp_path)
        file = files.get("/etc/tentalis/config/config.yaml")
        if component == "trainer":
            assert file is not None
            config = load_config(file, {})
            run = {"policy": "assistant", "runId": "demo"} | yaml.safe_load(values.read_text("utf-8")).get(
                "trainer", {}
            )
            assert (config.policy, config.run_id) == (run["policy"], run["runId"])
        elif component == "gateway" and file is not None:
            GatewaySettings.from_file(file, gateway_id="g")
        elif component in ("hinting", "experience") and file is not None:
            load_hinters(file)
        elif component == "scoring" and file is not None:
            load_scorers(file)


def test_users_have_the_acls_of_their_roles() -> None:
    users = {each["metadata"]["name"]: each["spec"] for each in chart.of_kind(set_of("strimzi"), "KafkaUser")}
    assert {"tentalis-join", "tentalis-admin", "tentalis-auditor", "tentalis-forget"} <= users.keys()
    assert "tentalis-experience" not in users  # its process does not run
    assert "tentalis-manager" in users  # `helm test` is one
    for name, spec in users.items():
        granted = {
            (acl["resource"]["type"].lower(), acl["resource"]["name"], acl["resource"]["patternType"], operation)
            for acl in spec["authorization"]["acls"]
            for operation in acl["operations"]
        }
        grants = acls.ROLES[name.removeprefix("tentalis-")].grants
        assert granted == {
            (
                each.resource.value.replace("-", ""),
                each.name,
                "prefix" if each.prefixed else "literal",
                each.operation.value,
            )
            for each in grants
        }


def test_strimzi_makes_every_topic_as_the_table_says() -> None:
    topics = {each["metadata"]["name"]: each["spec"] for each in chart.of_kind(set_of("strimzi"), "KafkaTopic")}
    wanted = topology.topic_table().topics
    assert {name: (spec["partitions"], spec["config"]) for name, spec in topics.items()} == {
        name: (topic.partitions, topic.config) for name, topic in wanted.items()
    }


def test_a_prefix_is_on_every_name_of_the_log() -> None:
    environment = os.environ | {namespace.VARIABLE: "staging"}
    command = [sys.executable, "-c", "from helm.generate import topology_file; print(topology_file())"]
    product = yaml.safe_load(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    changes = "kafka.namespacePrefix=staging,roles.worker.keda.enabled=true"
    done = chart.template("-f", str(CHART / "ci" / "strimzi-values.yaml"), "--set", changes)
    manifests = tuple(each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each)
    topics = {each["metadata"]["name"] for each in chart.of_kind(manifests, "KafkaTopic")}
    assert topics == product["topics"].keys() and "staging.tentalis.tasks.v1" in topics
    users = {each["metadata"]["name"]: each["spec"] for each in chart.of_kind(manifests, "KafkaUser")}
    for name, spec in users.items():
        assert spec["authorization"]["acls"] == product["users"][name.removeprefix("staging.tentalis-")]
    for _, pod in chart.pods(manifests):
        for each in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            assert {"name": namespace.VARIABLE, "value": "staging"} in each["env"]
    (scaled,) = chart.of_kind(manifests, "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["topic"] == "staging.tentalis.tasks.v1"
    assert trigger["metadata"]["consumerGroup"] == "staging.tentalis-worker-chat"


def expressions() -> list[tuple[str, str]]:
    found = [(rule["alert"], rule["expr"]) for rule in ALERTS]
    for name, dashboard in chart.dashboards().items():
        found += [
            (f"{name}: {panel['title']}", target["expr"])
            for panel in dashboard["panels"]
            for target in panel["targets"]
        ]
    return found


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda text: text[:60])
def test_alerts_and_dashboards_use_metrics_and_labels_that_exist(where: str, expression: str) -> None:
    names = set(re.findall(r"\b(?:tentalis|process)_\w+", expression))
    assert names and names <= SERIES.keys()
    labels = {*re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)}
    for listed in re.findall(r"by \(([^)]*)\)", expression):
        labels |= {label.strip() for label in listed.split(",")}
    assert labels <= {label for name in names for label in SERIES[name].labels} | {"le"}
    words = set(re.findall(r"[a-z_]+(?=\s*\()", expression))
    assert words <= FUNCTIONS


def test_counters_are_read_as_rates_and_gauges_are_not() -> None:
    for where, expression in expressions():
        for name in re.findall(r"\b(?:tentalis|process)_\w+", expression):
            rated = re.search(rf"(?:rate|increase)\({name}\b", expression) is not None
            assert rated is (SERIES[name].kind is not MetricKind.GAUGE), f"{where}: {name}"


def test_an_alert_is_about_its_own_release() -> None:
    scope = 'namespace="agents",app_kubernetes_io_instance="demo"'
    rules = chart.of_kind(set_of("monitoring"), "PrometheusRule")[0]["spec"]["groups"]
    for rule in (each for group in rules for each in group["rules"]):
        metrics = re.findall(r"\b(?:tentalis|process)_\w+(.{1,80})", rule["expr"] + " ")
        assert metrics and all(after.startswith("{" + scope) for after in metrics), rule["expr"]
        (given,) = [each["expr"] for each in ALERTS if each["alert"] == rule["alert"]]
        assert rule["expr"].replace("{" + scope + "}", "").replace(scope + ",", "") == given
    for monitor in chart.of_kind(set_of("monitoring"), "PodMonitor"):
        assert "app.kubernetes.io/instance" in monitor["spec"]["podTargetLabels"]


def runbook(alert: str) -> Path:
    return RUNBOOKS / f"{re.sub(r'(?<!^)(?=[A-Z])', '-', alert).lower()}.md"


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = {runbook(rule["alert"]): rule for rule in ALERTS}
    assert set(pages) == set(RUNBOOKS.glob("*.md"))
    for page, rule in pages.items():
        text = page.read_text("utf-8")
        assert text.startswith(f"# {rule['alert']}\n")
        for section in ("## Meaning", "## Impact", "## Look", "## Do"):
            assert section in text
    rules = chart.of_kind(set_of("monitoring"), "PrometheusRule")[0]["spec"]["groups"]
    for rule in (each for group in rules for each in group["rules"]):
        url = rule["annotations"]["runbook_url"]
        assert (ROOT / url.partition("/blob/main/")[2]) == runbook(rule["alert"])
    assert "TentalisOpenFiles" not in str(rules)


def test_every_value_is_described_and_in_the_schema() -> None:
    text = (CHART / "values.yaml").read_text("utf-8")
    described = {each.path for each in readme.described(text)}
    schema = yaml.safe_load((CHART / "values.schema.json").read_text("utf-8"))

    def walk(value: Any, path: tuple[str, ...], shape: dict[str, Any]) -> None:
        if "$ref" in shape:
            shape = schema["definitions"][shape["$ref"].rpartition("/")[2]]
        if path in described and path[:1] != ("roles",):
            return
        if not isinstance(value, dict) or not value:
            assert path in described or path[:1] == ("roles",), f"{'.'.join(path)} has no description"
            return
        if path[:1] == ("roles",) and "properties" not in shape:
            return  # amounts by resource
        assert shape.get("additionalProperties") is False, f"{'.'.join(path)} accepts any key"
        wanted = set(shape["properties"]) - {"global"}
        if path[:1] != ("roles",):
            assert wanted == set(value), f"{'.'.join(path)} differs from the schema"
        for key, below in value.items():
            walk(below, (*path, key), shape["properties"][key])

    walk(yaml.safe_load(text), (), schema)


def test_the_version_is_that_of_the_package() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'version = "{version["appVersion"]}"' in project
    assert version["annotations"]["artifacthub.io/images"].count(f":{version['appVersion']}\n") == 4


def test_the_oldest_kubernetes_of_the_chart_is_validated() -> None:
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["kubeVersion"]
    assert oldest == f">={chart.KUBERNETES[0]}.0-0"
    page = (ROOT / "docs" / "operations" / "helm.md").read_text("utf-8")
    assert f"validated against Kubernetes {' and '.join(chart.KUBERNETES)}," in page
