"""docker-compose.yml as plain data, with variables replaced as Compose does, and its comparison with the topology."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from tentalis.kafka.topology import Application, InStack
from tests.support import ROOT

METRICS_PORT = 9464
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?:(?P<operator>:?[-+])(?P<word>[^}]*))?\}")


def text() -> str:
    return (ROOT / "docker-compose.yml").read_text(encoding="utf-8")


def project(**variables: str) -> dict[str, Any]:
    """The file with `variables` set, and all others at their defaults."""
    return substituted(yaml.safe_load(text()), variables)


def variables_of(source: str) -> set[str]:
    """The variables that a text reads."""
    return {found["name"] for found in _VARIABLE.finditer(source)}


def substituted(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: substituted(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [substituted(each, variables) for each in value]
    return _VARIABLE.sub(lambda found: _value(found, variables), value) if isinstance(value, str) else value


def _value(found: re.Match[str], variables: Mapping[str, str]) -> str:
    name, operator, word = found["name"], found["operator"], found["word"]
    is_set = bool(variables.get(name)) if (operator or "").startswith(":") else name in variables
    if operator is None:
        assert name in variables, f"{name} has no default"
        return variables[name]
    if operator.endswith("+"):
        return word if is_set else ""
    return variables[name] if is_set else word


def profiles(services: Mapping[str, Any]) -> set[str]:
    return {profile for service in services.values() for profile in service.get("profiles", ())}


def active(services: Mapping[str, Any], *chosen: str) -> dict[str, Any]:
    """The services that `docker compose --profile ... up` starts."""
    return {
        name: service
        for name, service in services.items()
        if not service.get("profiles") or set(chosen) & set(service["profiles"])
    }


def unchecked(services: Mapping[str, Any]) -> set[str]:
    """The services whose health nobody asks for."""
    return {name for name, service in services.items() if "test" not in service.get("healthcheck", {})}


def product_image(service: Mapping[str, Any]) -> str | None:
    """The build target of a service of ours, else None."""
    build = service.get("build")
    return None if build is None else str(build["target"])


def deviations(services: Mapping[str, Any], applications: Iterable[Application]) -> list[str]:
    """Returns the differences between the services and the applications of the topology."""
    found = []
    for application in applications:
        service = services.get(application.name)
        if service is None:
            found.append(f"{application.name} has no service")
            continue
        if bool(service.get("profiles")) != (application.in_stack is InStack.NEVER):
            found.append(f"{application.name} is in the profiles {service.get('profiles', [])}")
        command: Sequence[str] = service.get("command", ())
        if tuple(command[: len(application.command)]) != application.command:
            found.append(f"{application.name} runs {command}, not {application.command}")
        if f":{application.port or METRICS_PORT}/readyz" not in " ".join(service["healthcheck"]["test"]):
            found.append(f"{application.name} is checked on another port than {application.port or METRICS_PORT}")
        waits = service.get("depends_on", {})
        found += [f"{application.name} does not wait for {name}" for name in application.after if name not in waits]
        restart = service["restart"]
        if restart != ("on-failure" if application.ends else "unless-stopped"):
            found.append(f"{application.name} has restart: {restart}")
    return found
