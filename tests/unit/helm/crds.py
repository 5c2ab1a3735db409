"""Schemas of the custom resources that the chart makes: those of their definitions (CRDs), made strict.

`custom_resources/` has one file per kind, from API version to JSON schema. `python -m tests.unit.helm.crds CRD.yaml`
writes the files again from the definitions that a release publishes; its README.md names the releases.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).with_name("custom_resources")
APIS = ("kafka.strimzi.io/v1", "kafka.strimzi.io/v1beta2", "keda.sh/v1alpha1", "monitoring.coreos.com/v1")
"""API versions that the chart can make."""
KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minLength", "minItems")
"""Keywords that mean the same in a CRD and in JSON Schema. Texts, defaults and CEL rules are left out."""

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
METADATA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "namespace"],
    "properties": {"name": TEXT, "namespace": TEXT, "labels": TEXTS, "annotations": TEXTS},
}

KAFKA_TRIGGER: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["bootstrapServers", "consumerGroup", "topic", "lagThreshold"],
    "properties": {
        **dict.fromkeys(("bootstrapServers", "consumerGroup", "topic"), TEXT),
        "lagThreshold": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "offsetResetPolicy": {"enum": ["latest", "earliest"]},
    },
}
"""The metadata of a trigger of type kafka: the definition of ScaledObject leaves it open, KEDA's scaler reads it."""


def strict(schema: Mapping[str, Any]) -> Schema:
    """Returns the JSON schema of a part of a CRD, in which a field that is not named is an error."""
    if schema.get("x-kubernetes-int-or-string"):
        pattern = {"pattern": schema["pattern"]} if "pattern" in schema else {}
        return {"anyOf": [{"type": "integer"}, TEXT | pattern]}
    made: Schema = {word: schema[word] for word in KEPT if word in schema}
    if "(?i)" in made.get("pattern", ""):
        # The patterns of a CRD are Go's, where a flag may stand anywhere.
        made["pattern"] = "(?i)" + made["pattern"].replace("(?i)", "")
    if "items" in schema:
        made["items"] = strict(schema["items"])
    if "properties" in schema:
        made["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
    if "additionalProperties" in schema:
        made["additionalProperties"] = strict(schema["additionalProperties"])
    elif schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


def resource(api: str, kind: str, schema: Mapping[str, Any]) -> Schema:
    """Returns the schema of a resource as a chart writes it: without status, with a name and a namespace."""
    made = strict(schema)
    made["properties"] |= {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": METADATA}
    made["properties"].pop("status", None)
    made["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return made


def served(definition: Mapping[str, Any]) -> tuple[str, dict[str, Schema]]:
    """Returns the kind that a CRD defines, with the schema of each API version that it serves."""
    spec = definition["spec"]
    kind = spec["names"]["kind"]
    apis = {f"{spec['group']}/{each['name']}": each["schema"] for each in spec["versions"] if each["served"]}
    return kind, {api: resource(api, kind, schema["openAPIV3Schema"]) for api, schema in apis.items() if api in APIS}


def schema_of(kind: str, api: str) -> Schema | None:
    """Returns the schema of a custom resource; None if `custom_resources/` has none."""
    path = FOLDER / f"{kind}.json"
    found: dict[str, Schema] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if kind == "ScaledObject" and api in found:
        trigger = found[api]["properties"]["spec"]["properties"]["triggers"]["items"]
        trigger["properties"] |= {"type": {"const": "kafka"}, "metadata": KAFKA_TRIGGER}
    return found.get(api)


def write(paths: Iterable[Path]) -> None:
    """Writes `custom_resources/` from definitions. Of an API version that several files serve, the last file counts."""
    made: dict[str, dict[str, Schema]] = {}
    for path in paths:
        kind, schemas = served(yaml.safe_load(path.read_text("utf-8")))
        made[kind] = made.get(kind, {}) | schemas
    for kind, schemas in made.items():
        text = json.dumps(dict(sorted(schemas.items())), separators=(",", ":"), sort_keys=True)
        (FOLDER / f"{kind}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(argument) for argument in sys.argv[1:])
