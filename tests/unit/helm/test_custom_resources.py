"""The custom resources of the chart are valid by the definitions of their operators, and the check finds errors."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.unit.helm import chart, crds
from tests.unit.helm.chart import CHART, Manifest, set_of

KINDS = sorted(path.stem for path in crds.FOLDER.glob("*.json"))
KUBERNETES = chart.KUBERNETES[-1]
SETS = ("monitoring", "strimzi", "large")


def first(kind: str) -> Manifest:
    """Returns a manifest of this kind, one that may be changed."""
    return copy.deepcopy(next(each for name in SETS for each in set_of(name) if each["kind"] == kind))


def objects(part: Any, schema: crds.Schema) -> Iterator[dict[str, Any]]:
    """Yields each object within a part of a manifest whose fields its schema names."""
    if isinstance(part, list):
        for each in part:
            yield from objects(each, schema["items"])
    elif isinstance(part, dict) and schema.get("additionalProperties") is False:
        yield part
        for name, inner in list(part.items()):
            yield from objects(inner, schema["properties"][name])


def test_the_sets_of_values_make_every_kind_that_has_a_schema() -> None:
    made = {each["kind"] for name in SETS for each in set_of(name)}
    assert made >= {*KINDS} and len(KINDS) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_no_definition_names_is_found_in_every_object(kind: str) -> None:
    manifest = first(kind)
    schema = crds.schema_of(kind, manifest["apiVersion"])
    assert schema is not None and chart.problems(manifest, KUBERNETES) == []
    found = list(objects(manifest, schema))
    assert len(found) >= 3
    for each in found:
        each["misspelt"] = 1
        assert any("misspelt" in problem for problem in chart.problems(manifest, KUBERNETES))
        del each["misspelt"]


def test_wrong_values_and_missing_fields_are_found() -> None:
    user, topic, rule = first("KafkaUser"), first("KafkaTopic"), first("PrometheusRule")
    user["spec"]["authorization"]["acls"][0]["operations"] = ["Reed"]
    topic["spec"]["partitions"] = "12"
    del rule["spec"]["groups"][0]["rules"][0]["expr"]
    assert [len(chart.problems(each, KUBERNETES)) for each in (user, topic, rule)] == [1, 1, 1]


def test_the_resources_are_also_those_of_strimzi_before_1_0() -> None:
    done = chart.template(
        "-f", str(CHART / "ci" / "strimzi-values.yaml"), "--set", "strimzi.apiVersion=kafka.strimzi.io/v1beta2"
    )
    found = [each for each in yaml.load_all(done.stdout, Loader=chart.LOADER) if each and "Kafka" in each["kind"]]
    assert {each["apiVersion"] for each in found} == {"kafka.strimzi.io/v1beta2"} and len(found) > 20
    assert [problem for each in found for problem in chart.problems(each, KUBERNETES)] == []


def test_a_definition_becomes_a_strict_schema() -> None:
    either = {"x-kubernetes-int-or-string": True, "pattern": "^[0-9]+$", "anyOf": [{"type": "integer"}]}
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    part = {"type": "object", "description": "text", "required": ["port"], "properties": {"port": either, "any": free}}
    assert crds.strict(part) == {
        "type": "object",
        "required": ["port"],
        "additionalProperties": False,
        "properties": {
            "port": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9]+$"}]},
            "any": {"type": "object"},
        },
    }
