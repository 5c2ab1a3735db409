"""Every value arrives in the manifests: `defaults` and `roles` in each workload, the others where they belong."""

import importlib.util
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.helm import chart
from tests.unit.helm.chart import CHART, VALUES, Manifest, container, pods, rendered, set_of, workloads
from tests.unit.helm.test_derived import ALERTS
from tests.unit.helm.test_rendered import values_id

GIVEN = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SETTINGS = CHART / "ci" / "settings-values.yaml"


def merged(base: Any, over: Any) -> Any:
    """Returns values with others over them, as Helm merges them."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return base if over is None else over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


def values_of(path: Path) -> dict[str, Any]:
    return dict(merged(GIVEN, yaml.safe_load(path.read_text("utf-8"))))


def settings_of(values: dict[str, Any], role: str) -> dict[str, Any]:
    return dict(merged(values["defaults"], values["roles"].get(role, {})))


def test_a_set_of_values_changes_every_setting_of_a_role() -> None:
    changed = yaml.safe_load(SETTINGS.read_text("utf-8"))
    given = [changed["defaults"], *changed["roles"].values()]
    assert {key for each in given for key in each} == GIVEN["defaults"].keys()
    for each in given:
        assert not [
            key for key, value in each.items() if merged(GIVEN["defaults"][key], value) == GIVEN["defaults"][key]
        ]


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_the_settings_of_a_role_arrive_in_its_pods(values: Path) -> None:
    manifests, given = rendered(values), values_of(values)
    for workload in workloads(manifests).values():
        role = chart.role_of(workload) or ""
        wanted, pod, found = settings_of(given, role), workload["spec"]["template"], container(workload)
        spec, labels = pod["spec"], pod["metadata"]
        for key in ("runtimeClassName", "priorityClassName", "nodeSelector", "tolerations"):
            assert spec.get(key, type(wanted[key])()) == wanted[key], (role, key)
        assert spec["terminationGracePeriodSeconds"] == wanted["terminationGracePeriodSeconds"]
        if wanted["topologySpreadConstraints"] is not None:
            assert spec.get("topologySpreadConstraints", []) == wanted["topologySpreadConstraints"]
        assert wanted["affinity"].items() <= spec.get("affinity", {}).items()
        assert wanted["podLabels"].items() <= labels["labels"].items()
        assert wanted["podAnnotations"].items() <= labels["annotations"].items()
        hub = [{"secretRef": {"name": given["model"]["hubSecret"]}}] if given["model"]["hubSecret"] else []
        reaching = [*chart.STORING, *(["worker"] if given["storage"]["attachments"] else [])]
        store = [{"secretRef": {"name": each}} for each in [given["storage"]["credentialsSecret"]] if each]
        given_by = (hub if role in ("trainer", "model") else []) + (store if role in reaching else [])
        assert found.get("envFrom", []) == wanted["envFrom"] + given_by
        assert all(each in found["env"] for each in wanted["env"])
        assert all(each in found["volumeMounts"] for each in wanted["volumeMounts"])
        assert all(each in spec["volumes"] for each in wanted["volumes"])
        assert found["args"][len(found["args"]) - len(wanted["args"]) :] == wanted["args"]
        gpu = {wanted["gpu"]["resource"]: wanted["gpu"]["count"]} if wanted["gpu"]["count"] else {}
        assert found["resources"] == wanted["resources"] | {"limits": wanted["resources"]["limits"] | gpu}
        assert wanted["livenessProbe"].items() <= found["livenessProbe"].items()
        assert wanted["readinessProbe"].items() <= found["readinessProbe"].items()
        startup = found["startupProbe"]
        assert 0 <= startup["periodSeconds"] * startup["failureThreshold"] - wanted["startupSeconds"] < 5
        if wanted["image"]:
            assert f"/{wanted['image']}:" in found["image"]


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_scale_budgets_and_claims_are_as_the_settings_say(values: Path) -> None:
    manifests, given = rendered(values), values_of(values)
    for workload in workloads(manifests).values():
        role, name = chart.role_of(workload) or "", workload["metadata"]["name"]
        wanted = settings_of(given, role)
        about = {each["kind"]: each.get("spec", {}) for each in manifests if each["metadata"]["name"] == name}
        scaled = wanted["autoscaling"]["enabled"] or wanted["keda"]["enabled"]
        replicas = given["trainer"]["nodes"] if role == "trainer" else wanted["replicas"]
        assert workload["spec"].get("replicas") == (None if scaled or workload["kind"] == "Job" else replicas)
        several = workload["kind"] != "Job" and (scaled or wanted["replicas"] > 1)
        budget = about.get("PodDisruptionBudget")
        assert (budget is not None) is (several and wanted["podDisruptionBudget"]["enabled"])
        if budget is not None:
            assert budget["maxUnavailable"] == wanted["podDisruptionBudget"]["maxUnavailable"]
        if wanted["autoscaling"]["enabled"]:
            hpa, asked = about["HorizontalPodAutoscaler"], wanted["autoscaling"]
            assert (hpa["minReplicas"], hpa["maxReplicas"]) == (asked["minReplicas"], asked["maxReplicas"])
            cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": asked["cpu"]}}
            assert hpa["metrics"] == (asked["metrics"] or [{"type": "Resource", "resource": cpu}])
        if wanted["keda"]["enabled"]:
            keda, asked = about["ScaledObject"], wanted["keda"]
            assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (asked["minReplicas"], asked["maxReplicas"])
            assert keda["cooldownPeriod"] == asked["cooldownSeconds"]
            for trigger in keda["triggers"]:
                assert trigger["metadata"]["lagThreshold"] == f"{asked['lagSeconds'] * asked['tasksPerSecond']:.0f}"
                assert trigger.get("authenticationRef", {"name": ""}) == {"name": asked["authenticationRef"]}
        for claim in workload["spec"].get("volumeClaimTemplates", ()):
            size, storage_class = wanted["persistence"]["size"], wanted["persistence"]["storageClass"]
            assert claim["spec"]["resources"] == {"requests": {"storage": size}}
            assert claim["spec"].get("storageClassName", "") == storage_class
    for claim in chart.of_kind(manifests, "PersistentVolumeClaim"):
        assert claim["spec"]["accessModes"] == [given["storage"]["accessMode"]]
        assert claim["spec"]["resources"] == {"requests": {"storage": given["storage"]["size"]}}
        assert claim["spec"].get("storageClassName", "") == given["storage"]["storageClass"]


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_every_pod_of_ours_may_be_pulled_and_names_secrets_of_the_values(values: Path) -> None:
    given = values_of(values)
    texts = set(re.findall(r"[\w.-]+", yaml.safe_dump(given)))
    texts |= {each["metadata"]["name"] for each in chart.of_kind(rendered(values), "Secret")}
    for _, pod in pods(rendered(values)):
        role = pod["metadata"]["labels"].get("tentalis.io/role")
        if role is None:  # the embedded Kafka
            continue
        assert [each["name"] for each in pod["spec"].get("imagePullSecrets", [])] == given["imagePullSecrets"]
        user = {"test": "manager"}.get(role, role)
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                shared = not given["kafka"]["perRoleUsers"] or volume["name"] not in ("sasl", "client")
                assert (name if shared else name.removesuffix(f"-{user}")) in texts, (role, name)
                assert shared or name.endswith(f"-{user}")
                assert {each["key"] for each in volume["secret"].get("items", ())} <= texts


def test_the_gateway_serves_until_its_endpoints_are_gone() -> None:
    gateway = container(workloads(set_of("minimal"))["gateway"])
    assert gateway["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "5"]}}}


def test_the_job_of_the_topics_has_its_settings() -> None:
    job = chart.named(set_of("settings"), "Job", "demo-tentalis-topics")
    found, wanted = container(job), values_of(SETTINGS)["topics"]
    assert found["args"] == ["topics", "apply", "--yes", "--on-risk", wanted["onRisk"], "--accept-loss"]
    assert found["resources"] == wanted["resources"]
    assert {"name": "TENTALIS_REPLICATION_FACTOR", "value": "2"} in found["env"]
    for topic in chart.of_kind(set_of("strimzi"), "KafkaTopic"):
        assert topic["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert topic["metadata"]["labels"]["strimzi.io/cluster"] == "main" and topic["spec"]["replicas"] == 3


def test_the_gateway_is_reached_from_outside() -> None:
    given = values_of(SETTINGS)["gateway"]["service"]
    service = chart.named(set_of("settings"), "Service", "demo-tentalis-gateway")
    assert service["spec"]["type"] == given["type"] and service["metadata"]["annotations"] == given["annotations"]
    assert [each["port"] for each in service["spec"]["ports"] if each["name"] == "http"] == [given["port"]]
    (ingress,) = chart.of_kind(set_of("ingress"), "Ingress")
    asked = values_of(CHART / "ci" / "ingress-values.yaml")["gateway"]["ingress"]
    assert ingress["metadata"]["annotations"] == asked["annotations"]
    backend = {"service": {"name": "demo-tentalis-gateway", "port": {"name": "http"}}}
    assert ingress["spec"] == {
        "ingressClassName": asked["className"],
        "tls": [{"hosts": [asked["host"]], "secretName": asked["tlsSecret"]}],
        "rules": [
            {"host": asked["host"], "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
        ],
    }


def test_alerts_and_monitors_have_their_times_and_labels() -> None:
    manifests, given = set_of("monitoring"), values_of(CHART / "ci" / "monitoring-values.yaml")["monitoring"]
    (rules,) = chart.of_kind(manifests, "PrometheusRule")
    found = {rule["alert"]: rule for group in rules["spec"]["groups"] for rule in group["rules"]}
    assert found.keys() == {rule["alert"] for rule in ALERTS} - set(given["rules"]["disabled"])
    for rule in ALERTS:
        if rule["alert"] in found:
            made = found[rule["alert"]]
            assert made["for"] == rule["for"]
            assert made["labels"] == rule["labels"] | given["rules"]["alertLabels"]
            assert made["annotations"]["summary"] == rule["summary"]
    for kind, name in (("PodMonitor", "podMonitor"), ("ServiceMonitor", "serviceMonitor"), ("PrometheusRule", "rules")):
        for each in chart.of_kind(manifests, kind):
            assert given[name]["labels"].items() <= each["metadata"]["labels"].items()
            for endpoint in each["spec"].get("podMetricsEndpoints", each["spec"].get("endpoints", ())):
                assert endpoint["interval"] == given[name]["interval"]


@pytest.mark.parametrize("values", VALUES, ids=values_id)
def test_the_test_of_the_release_asks_its_run(values: Path) -> None:
    spec = importlib.util.spec_from_file_location("learns", CHART / "files" / "learns.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    given, (pod,) = values_of(values), chart.of_kind(rendered(values), "Pod")
    (found,) = pod["spec"]["containers"]
    assert found["command"] == ["python", "/etc/tentalis/test/learns.py"]
    asked = script.arguments(found["args"])
    assert (asked.policy, asked.timeout) == (given["trainer"]["policy"], given["tests"]["timeoutSeconds"])
    assert asked.run == (given["trainer"]["runId"] or "demo")
    assert asked.environment == next(each for each in given["worker"]["environments"] if each in ("chat", "math"))
    assert found["resources"] == given["tests"]["resources"]


def notes(folder: Path, values: Path) -> str:
    """Returns NOTES.txt as `helm install` prints it, which renders it only for a cluster."""
    copy = folder / values.stem
    shutil.copytree(CHART, copy)
    (copy / "templates" / "NOTES.txt").rename(copy / "files" / "notes.txt")
    page = '{text: {{ tpl (.Files.Get "files/notes.txt") . | toJson }}}'
    (copy / "templates" / "notes.yaml").write_text(page, encoding="utf-8")
    shown = ("-f", str(values), "--show-only", "templates/notes.yaml")
    done = chart.helm("template", chart.RELEASE, str(copy), "-n", chart.NAMESPACE, *shown)
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["text"])


def test_the_notes_name_commands_and_resources_that_exist(tmp_path: Path) -> None:
    text, manifests = notes(tmp_path, SETTINGS), set_of("settings")
    commands = [line.split() for line in text.splitlines() if line.startswith("   ")]
    assert [command[:2] for command in commands if command[0] == "helm"] == [["helm", "test"]]
    (tested,) = [command for command in commands if command[0] == "helm"]
    assert tested[2:] == ["-n", chart.NAMESPACE, chart.RELEASE, "--timeout", "159s", "--logs"]
    assert chart.helm(tested[1], "--help").stdout.count("--timeout") and chart.helm(tested[1], "--help").returncode == 0
    (wait, forward) = [command[3:] for command in commands if command[0] == "kubectl"]
    assert wait[:3] == ["wait", "--for=condition=Ready", "pod"] and forward[0] == "port-forward"
    assert f"app.kubernetes.io/instance={chart.RELEASE},tentalis.io/role," in wait[4]
    kind, _, name = forward[1].partition("/")
    service: Manifest = chart.named(manifests, {"svc": "Service"}[kind], name)
    assert forward[2] == f"8200:{service['spec']['ports'][0]['port']}"
    assert "The gateway asks for no API key" not in text
    assert "OPENAI_API_KEY" not in text
    trial = notes(tmp_path, CHART / "ci" / "trial-values.yaml")
    secret: Manifest = chart.named(set_of("trial"), "Secret", "demo-tentalis-keys")
    (shown,) = [line.split() for line in trial.splitlines() if "OPENAI_API_KEY" in line]
    assert shown[5:7] == ["secret", secret["metadata"]["name"]] and "{.data.api-key}" in " ".join(shown)
    assert "The gateway asks for no API key" not in trial
    open_values = tmp_path / "open.yaml"
    open_values.write_text("{kafka: {embedded: {enabled: true}}, gateway: {noKeys: true}}", encoding="utf-8")
    assert "The gateway asks for no API key" in notes(tmp_path, open_values)


@pytest.mark.parametrize(
    ("policy", "model", "told"),
    [
        ("{enabled: true}", "smollm2", True),
        ("{enabled: true, externalEgress: [{ports: [{port: 443}]}]}", "smollm2", False),
        ("{enabled: true}", "/models/own", False),
        ("{enabled: false}", "smollm2", False),
    ],
)
def test_the_notes_tell_that_network_policies_keep_the_model_from_being_fetched(
    policy: str, model: str, told: bool, tmp_path: Path
) -> None:
    values = tmp_path / "walled.yaml"
    given = f"{{kafka: {{embedded: {{enabled: true}}}}, networkPolicy: {policy}, model: {{name: {model}}}}}"
    values.write_text(given, encoding="utf-8")
    text = notes(tmp_path, values)
    assert ("do not let the model server and the trainer fetch" in text) == told
    option = [line.strip() for line in text.splitlines() if line.strip().startswith("--set-json")]
    if told:
        done = chart.template("-f", str(values), *shlex.split(option[0]))
        assert done.returncode == 0 and "port: 443" in done.stdout, done.stderr
