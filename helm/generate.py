"""`python -m helm.generate`: writes the generated files of the chart; `--check` only compares them.

Written are files/topology.yaml (from `tentalis.kafka.topology`, the ACLs and the commands), the roles in
values.schema.json, the dashboards of chart, compose and local stack (from dashboards.yaml beside this file), the alert
rules of compose and local stack (from the chart's alerts), and the table of values in README.md.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import typer
import yaml

from helm import dashboards, readme
from tentalis.cli.main import app
from tentalis.kafka import acls, topology
from tentalis.kafka.topology import Application, InStack

CHART = Path(__file__).with_name("tentalis")
COMPOSE_DASHBOARDS = CHART.parents[1] / "deploy" / "grafana" / "dashboards"
COMPOSE_ALERTS = CHART.parents[1] / "deploy" / "prometheus" / "alerts.json"
LOCAL = CHART.parents[1] / "tentalis" / "local" / "observability"
RUNBOOKS = "docs/operations/runbooks/"
HEAD = "# Written by `python -m helm.generate` (make chart) from tentalis/kafka/topology.py. Do not edit.\n"

# Applications of which one process runs per release: a second one would take over from the first, or serve apart.
SINGLE = frozenset({"manager", "policies", "trainer", "model"})
# Options that the chart gives to every process whose command has them.
OPTIONS = ("--instance", "--metrics-port", "--host", "--port", "--server", "--server-id", "--state", "--hinters")


def command_options(application: Application) -> set[str]:
    """Returns the options of an application's command, such as `--instance`."""
    command: Any = typer.main.get_command(app)
    for word in application.command:
        command = command.commands[word]
    return {option for parameter in command.params for option in parameter.opts}


def role(application: Application) -> dict[str, Any]:
    """Returns the entry of an application in files/topology.yaml."""
    known = command_options(application)
    partitions = [topology.topic_table()[topic].partitions for topic in application.consumes]
    return {
        "purpose": application.purpose,
        "command": list(application.command),
        "options": [option for option in OPTIONS if option in known],
        "stream": application.stream,
        "single": application.name in SINGLE,
        "ends": application.ends,
        "default": application.in_stack is InStack.ALWAYS or application.in_stack is InStack.WITH_GATEWAY,
        "port": application.port,
        "group": application.group,
        "groupBy": None if application.group_by is None else application.group_by.value,
        "consumes": list(application.consumes),
        "mostReplicas": None if application.name in SINGLE else max(partitions, default=None),
        "onLog": application.name in acls.ROLES,
    }


def acl(grants: tuple[acls.Grant, ...]) -> list[dict[str, Any]]:
    """Returns grants as the ACLs of a Strimzi KafkaUser: one entry per resource, with its operations."""
    kinds = {acls.Resource.TRANSACTIONAL_ID: "transactionalId"}
    merged: dict[tuple[str, str, str], list[str]] = {}
    for grant in grants:
        pattern = "prefix" if grant.prefixed else "literal"
        kind = kinds.get(grant.resource, grant.resource.value)
        merged.setdefault((kind, grant.name, pattern), []).append(grant.operation.value)
    return [
        {"resource": {"type": kind, "name": name, "patternType": pattern}, "operations": operations}
        for (kind, name, pattern), operations in merged.items()
    ]


def topology_file() -> str:
    """Returns the text of files/topology.yaml."""
    topics = topology.topic_table()
    content = {
        "roles": {each.name: role(each) for each in topology.APPLICATIONS},
        "topics": {
            topic.name: {"partitions": topic.partitions, "config": topic.config} for topic in topics.topics.values()
        },
        "recordLimitBytes": topics.record_limit_bytes,
        "users": {each.name: acl(each.grants) for each in acls.ROLES.values()},
    }
    return HEAD + yaml.dump(content, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """A dumper without anchors: the reader of the chart's templates sees every entry whole."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def schema_file() -> str:
    """Returns values.schema.json with the roles of the topology."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    schema["properties"]["roles"]["properties"] = {
        each.name: {"$ref": "#/definitions/singleRole" if each.name in SINGLE else "#/definitions/role"}
        for each in topology.APPLICATIONS
    }
    users = [each for each in acls.ROLES if each not in {app.name for app in topology.APPLICATIONS}]
    schema["properties"]["strimzi"]["properties"]["users"]["properties"]["extra"]["items"]["enum"] = users
    return json.dumps(schema, indent=2) + "\n"


def rule_file() -> str:
    """Returns the alerts of the chart as a rule file of Prometheus."""
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text(encoding="utf-8"))
    groups = [
        {
            "name": group["name"],
            "rules": [
                {name: value for name, value in rule.items() if name != "summary"}
                | {"annotations": {"summary": rule["summary"], "runbook": f"{RUNBOOKS}{_kebab(rule['alert'])}.md"}}
                for rule in group["rules"]
            ],
        }
        for group in alerts["groups"]
    ]
    return json.dumps({"groups": groups}, indent=1) + "\n"


def _kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def files() -> dict[Path, str]:
    """Returns the content of every generated file."""
    panels = yaml.safe_load(Path(__file__).with_name("dashboards.yaml").read_text(encoding="utf-8"))
    values = (CHART / "values.yaml").read_text(encoding="utf-8")
    page = CHART / "README.md"
    return {
        CHART / "files" / "topology.yaml": topology_file(),
        CHART / "values.schema.json": schema_file(),
        LOCAL / "alerts.json": rule_file(),
        COMPOSE_ALERTS: rule_file(),
        page: readme.rewritten(page.read_text(encoding="utf-8"), values),
        **{
            folder / f"{name}.json": json.dumps(dashboards.dashboard(name, each, process), indent=1) + "\n"
            for folder, process in (
                (CHART / "files" / "dashboards", "pod"),
                (COMPOSE_DASHBOARDS, "service"),
                (LOCAL / "dashboards", "process"),
            )
            for name, each in panels.items()
        },
    }


def main(arguments: list[str]) -> int:
    """Writes the files that differ, or with `--check` names them; returns the exit code."""
    stale = [path for path, text in files().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path} is not up to date: run `make chart`", file=sys.stderr)
        return bool(stale)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files()[path], encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
