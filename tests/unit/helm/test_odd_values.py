"""Odd values and names: rendered to what Kubernetes accepts, or refused with the value to change."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.helm import chart
from tests.unit.helm.chart import CHART, Manifest
from tests.unit.helm.test_settings import notes

SCHEMA: dict[str, Any] = yaml.safe_load((CHART / "values.schema.json").read_text("utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
MINIMAL = ("--set", "kafka.bootstrap=kafka:9092", "--set", "gateway.keysSecret=keys")
MONITORED = ("--set", "monitoring.podMonitor.enabled=true", "--set", "monitoring.rules.enabled=true")
DIGITS = (
    *("gateway.keysSecret", "storage.existingClaim", "cache.existingClaim", "serviceAccount.name", "nameOverride"),
    *("imagePullSecrets[0]", "defaults.priorityClassName", "defaults.runtimeClassName", "gateway.ingress.className"),
    *("gateway.ingress.tlsSecret", "kafka.sasl.existingSecret", "kafka.tls.caSecret", "kafka.tls.clientSecret"),
    *("registry.existingSecret", "registry.caSecret", "episodes.existingSecret", "environmentFile.configMap"),
    *("roles.gateway.persistence.storageClass", "model.hubSecret", "commonLabels.team", "defaults.podLabels.cost"),
)
"""Values that name something: its name may have only digits, which YAML takes for a number."""
SECURED = (
    "kafka.bootstrap=kafka:9092,kafka.securityProtocol=SASL_SSL,registry.url=https://registry,registry.username=me,"
    "gateway.ingress.enabled=true,gateway.ingress.host=a.example,roles.gateway.persistence.enabled=true"
)


class Strict(yaml.SafeLoader):
    """Refuses a mapping with the same key twice, as Helm does when it reads what it has rendered."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns a mapping."""
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]  # type: ignore[no-untyped-call]
        assert len(keys) == len(set(keys)), f"the same key twice: {keys}"
        return dict(super().construct_mapping(node, deep))


def valid(text: str) -> list[Manifest]:
    """Returns the manifests of a text that Kubernetes accepts."""
    found = [each for each in yaml.load_all(text, Loader=Strict) if each]
    assert [problem for each in found for problem in chart.problems(each, chart.KUBERNETES[-1])] == []
    return found


def refused(*arguments: str, release: str = chart.RELEASE) -> str:
    """Returns the message with which values are refused."""
    done = chart.helm("template", release, str(CHART), "--namespace", chart.NAMESPACE, *arguments)
    assert done.returncode != 0
    return done.stderr


def test_names_of_digits_stay_texts() -> None:
    given = [argument for name in DIGITS for argument in ("--set-string", f"{name}=123")]
    done = chart.helm("template", "true", str(CHART), "--namespace", "456", "--set", SECURED, *given)
    assert done.returncode == 0, done.stderr
    for each in valid(done.stdout):
        assert each["metadata"]["namespace"] == "456"
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "true"


def test_labels_of_a_pod_come_before_the_common_ones_and_none_is_there_twice() -> None:
    given = (
        "commonLabels.team=a,commonLabels.release=a,defaults.podLabels.team=b,monitoring.podMonitor.labels.release=b"
    )
    done = chart.template(*MINIMAL, *MONITORED, "--set", given)
    assert done.returncode == 0, done.stderr
    manifests = tuple(valid(done.stdout))
    assert {pod["metadata"]["labels"]["team"] for of, pod in chart.pods(manifests) if chart.role_of(of)} == {"b"}
    assert {each["metadata"]["labels"]["team"] for each in manifests} == {"a"}
    monitors = chart.of_kind(manifests, "PodMonitor")
    assert [each["metadata"]["labels"]["release"] for each in monitors] == ["b", "b"]


@pytest.mark.parametrize("release", ["1demo", "my.release"])
def test_a_release_whose_services_could_not_be_named_so_is_refused(release: str) -> None:
    assert "set fullnameOverride, or give the release another name" in refused(*MINIMAL, release=release)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("fullnameOverride=9a", "resources would be named 9a-gateway"),
        ("commonLabels.app\\.kubernetes\\.io/name=x", "commonLabels has app.kubernetes.io/name"),
        ("roles.join.podLabels.tentalis\\.io/role=x", "the podLabels of roles.join have tentalis.io/role"),
        ("roles.gateway.autoscaling.enabled=true,roles.gateway.autoscaling.minReplicas=9", "minReplicas is 9"),
        ("roles.worker.keda.enabled=true,roles.worker.keda.minReplicas=9", "minReplicas is 9"),
        (
            "roles.gateway.enabled=false,gateway.ingress.enabled=true,gateway.ingress.host=a.example",
            "roles.gateway.enabled is false",
        ),
        (
            "kafka.bootstrap=,kafka.embedded.enabled=true,gateway.keysSecret=,topics.replicationFactor=3",
            "the embedded Kafka is one broker",
        ),
        (
            f"worker.environments={{{'e' * 50}}},monitoring.serviceMonitor.enabled=true",
            "a name of more than 63 characters",
        ),
        (f"worker.environments={{{'e' * 57}}}", "worker.environments.0"),
        ("kafka=null", "kafka is required"),
        ("defaults.gpu=null", "gpu is required"),
    ],
)
def test_values_that_a_cluster_would_refuse_are_refused_before(changes: str, message: str) -> None:
    assert message in refused(*MINIMAL, "--set", changes)


def test_a_section_without_its_values_is_refused_by_the_schema_and_an_empty_map_is_none() -> None:
    """A key without a value in a file of values takes the default away."""
    empty: list[str] = []

    def walk(value: dict[str, Any], shape: dict[str, Any], path: tuple[str, ...]) -> None:
        sections = []
        for key in (key for key, below in value.items() if isinstance(below, dict)):
            below = shape["properties"][key]
            reference = below.get("$ref", "").rpartition("/")[2]
            if "properties" not in (SCHEMA["definitions"][reference] if reference else below):
                empty.append(".".join((*path, key)))
                continue
            sections.append(key)
            if not reference and (*path, key) != ("roles",):
                walk(value[key], below, (*path, key))
        assert shape.get("required", []) == sections, f"{'.'.join(path)}: not all sections are required"

    walk(VALUES, SCHEMA, ())
    done = chart.template(*MINIMAL, *MONITORED, "--set", ",".join(f"{name}=null" for name in [*empty, "roles.gateway"]))
    assert done.returncode == 0, done.stderr
    valid(done.stdout)


def test_every_image_can_have_a_digest() -> None:
    images = SCHEMA["properties"]["image"]["properties"]["digests"]["properties"]
    assert set(images) == {"core", "worker-gui", "trainer-cpu", "trainer-gpu", "model"}
    digest = "sha256:" + 64 * "0"
    pinned = ("--set", f"roles.worker.image=worker-gui,image.digests.worker-gui={digest}")
    done = chart.template(*MINIMAL, *pinned, "--show-only", "templates/workloads.yaml")
    assert f"ghcr.io/tentalis/worker-gui@{digest}" in done.stdout


def test_the_notes_name_no_gateway_where_there_is_none(tmp_path: Path) -> None:
    values = tmp_path / "no-gateway.yaml"
    values.write_text("{kafka: {bootstrap: 'kafka:9092'}, roles: {gateway: {enabled: false}}}", encoding="utf-8")
    assert "-gateway" not in notes(tmp_path, values)
