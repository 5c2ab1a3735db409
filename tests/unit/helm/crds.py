"""Small strict schemas of the custom resources that the chart makes: the fields that it sets, and no others."""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def strict(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """Returns the schema of an object with these properties only."""
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def listed(items: Schema) -> Schema:
    """Returns the schema of a list that is not empty."""
    return {"type": "array", "minItems": 1, "items": items}


def resource(api: str, kind: str, spec: Schema) -> Schema:
    """Returns the schema of a custom resource."""
    metadata = strict(("name", "namespace"), name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)
    properties = {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return strict(("apiVersion", "kind", "metadata", "spec"), **properties)


EXPRESSION = strict(("key", "operator"), key=TEXT, operator={"enum": ["In", "NotIn", "Exists"]}, values=listed(TEXT))
SELECTOR = strict(matchLabels=LABELS, matchExpressions=listed(EXPRESSION))
ENDPOINT = strict(("port",), port=TEXT, path=TEXT, interval=TEXT)
ACL = strict(
    ("resource", "operations"),
    resource=strict(
        ("type", "name", "patternType"),
        type={"enum": ["topic", "group", "cluster", "transactionalId"]},
        name=TEXT,
        patternType={"enum": ["literal", "prefix"]},
    ),
    operations=listed(
        {"enum": ["Read", "Write", "Create", "Describe", "Alter", "AlterConfigs", "DescribeConfigs", "IdempotentWrite"]}
    ),
)
RULE = strict(
    ("alert", "expr"),
    alert=TEXT,
    expr=TEXT,
    **{"for": {"type": "string", "pattern": "^[0-9]+[smh]$"}},
    labels=LABELS,
    annotations=LABELS,
)

CUSTOM: dict[str, Schema] = {
    "KafkaTopic": resource(
        "kafka.strimzi.io/v1",
        "KafkaTopic",
        strict(("partitions", "replicas"), partitions=NUMBER, replicas=NUMBER, config=LABELS),
    ),
    "KafkaUser": resource(
        "kafka.strimzi.io/v1",
        "KafkaUser",
        strict(
            ("authentication", "authorization"),
            authentication=strict(("type",), type={"enum": ["tls", "scram-sha-512"]}),
            authorization=strict(("type", "acls"), type={"const": "simple"}, acls=listed(ACL)),
        ),
    ),
    "ScaledObject": resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        strict(
            ("scaleTargetRef", "triggers"),
            scaleTargetRef=strict(("name",), apiVersion=TEXT, kind=TEXT, name=TEXT),
            minReplicaCount=NUMBER,
            maxReplicaCount=NUMBER,
            cooldownPeriod=NUMBER,
            triggers=listed(
                strict(
                    ("type", "metadata"),
                    type={"const": "kafka"},
                    metadata=strict(
                        ("bootstrapServers", "consumerGroup", "topic", "lagThreshold"),
                        bootstrapServers=TEXT,
                        consumerGroup=TEXT,
                        topic=TEXT,
                        lagThreshold=TEXT,
                        offsetResetPolicy=TEXT,
                    ),
                    authenticationRef=strict(("name",), name=TEXT),
                )
            ),
        ),
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        strict(("selector",), selector=SELECTOR, podTargetLabels=listed(TEXT), podMetricsEndpoints=listed(ENDPOINT)),
    ),
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        strict(("selector",), selector=SELECTOR, targetLabels=listed(TEXT), endpoints=listed(ENDPOINT)),
    ),
    "PrometheusRule": resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        strict(("groups",), groups=listed(strict(("name", "rules"), name=TEXT, rules=listed(RULE)))),
    ),
}
