"""Renders the chart, one process per set of values, and validates manifests strictly."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubernetes_validate import utils
from referencing import Registry, Resource

from tests.support import ROOT
from tests.unit.helm.crds import schema_of

CHART = ROOT / "helm" / "tentalis"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
HELM = Path(sys.executable).with_name("helm")
NAMESPACE, RELEASE = "agents", "demo"
STORING = ("trainer", "policies", "model")
KUBERNETES = ("1.29", "1.34")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Manifest = dict[str, Any]


def helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs helm."""
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def template(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Renders the chart."""
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments)


@functools.cache
def rendered(values: Path) -> tuple[Manifest, ...]:
    """Returns the manifests for a file of values, hooks included."""
    done = template("-f", str(values))
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.load_all(done.stdout, Loader=LOADER) if each)


def set_of(name: str) -> tuple[Manifest, ...]:
    """Returns the manifests for `ci/NAME-values.yaml`."""
    return rendered(CHART / "ci" / f"{name}-values.yaml")


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    """Returns the manifests of some kinds."""
    return [each for each in manifests if each["kind"] in kinds]


def named(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """Returns the manifest of this kind and name."""
    (found,) = [each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name]
    return found


def pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yields each manifest that makes pods, with the pod's metadata and spec."""
    for each in manifests:
        if each["kind"] == "Pod":
            yield each, each
        elif "template" in each.get("spec", {}):
            yield each, each["spec"]["template"]


def role_of(manifest: Manifest) -> str | None:
    """Returns the role of a workload of the product, None for others."""
    pod = manifest["spec"].get("template", manifest)
    role = pod["metadata"]["labels"].get("tentalis.io/role")
    return None if role in ("admin", "test") else role


def workloads(manifests: tuple[Manifest, ...]) -> dict[str, Manifest]:
    """Returns the workloads of the product's applications by component."""
    found = of_kind(manifests, "Deployment", "StatefulSet", "Job")
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found if role_of(each)}


def container(manifest: Manifest) -> Manifest:
    """Returns the only container of a workload."""
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(found)


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    content = utils.schema_contents(f"{folder}/_definitions.json", version)
    registry: Registry[Any] = Resource.from_contents(content) @ Registry()
    return registry


@functools.cache
def _validator(kind: str, api: str, version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group, _, number = api.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], number) if part)
    schema = utils.schema_contents(f"{folder}/{name}.json", version)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.cache
def _custom_validator(kind: str, api: str) -> Any:
    schema = schema_of(kind, api)
    return None if schema is None else jsonschema.Draft202012Validator(schema)


def problems(manifest: Manifest, version: str) -> list[str]:
    """Returns the errors of a manifest against the strict schema of a Kubernetes version, or of its custom resource."""
    kind, api = manifest["kind"], manifest["apiVersion"]
    validator = _custom_validator(kind, api) or _validator(kind, api, version)
    return [
        f"{kind} {manifest['metadata']['name']}: {each.json_path}: {each.message}"
        for each in validator.iter_errors(manifest)
    ]


def dashboards() -> dict[str, Any]:
    """Returns the dashboards of the chart by name."""
    return {path.stem: json.loads(path.read_text("utf-8")) for path in (CHART / "files" / "dashboards").glob("*.json")}
