"""The first settings file and the gateway's backends, as commented text. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tentalis.ops.machine import API_KEYS, Machine

LOCAL_PROTOCOL = "PLAINTEXT"


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to the questions of the wizard; without it, those that the machine suggests.

    `bootstrap` None: `tentalis up` starts a broker.
    """

    bootstrap: str | None = None
    namespace: str | None = None
    protocol: str = LOCAL_PROTOCOL
    username: str | None = None
    password_file: str | None = None
    home: str = ".tentalis"


def settings_text(answers: Answers, machine: Machine) -> str:
    """Returns the text of a settings file."""
    return "\n".join(_settings(answers, machine)) + "\n"


def _settings(answers: Answers, machine: Machine) -> Iterator[str]:
    yield "# Settings of Tentalis, written by `tentalis init`. `tentalis config list` shows every key and its meaning."
    yield "# An option of a command and the environment take precedence; `tentalis config show` names each origin."
    yield ""
    if answers.bootstrap is None:
        yield "# Kafka. Without a name, `tentalis up` starts a broker on this machine."
        yield "#bootstrap: kafka-1.example:9092,kafka-2.example:9092"
    else:
        yield "# Kafka. Leave it out, and `tentalis up` starts a broker on this machine."
        yield _line("bootstrap", answers.bootstrap)
    yield ""
    yield "# A prefix of topics and groups, so that several stacks can share one Kafka (docs/operations/namespaces.md)."
    yield _line("namespace", answers.namespace, "staging")
    yield ""
    yield "# The login to Kafka (docs/operations/security.md)."
    secure = answers.protocol != LOCAL_PROTOCOL
    yield _line("security_protocol", answers.protocol if secure else None, "SASL_SSL")
    yield _line("sasl_mechanism", "SCRAM-SHA-512" if answers.username else None, "SCRAM-SHA-512")
    yield _line("sasl_username", answers.username, "ann")
    yield _line("sasl_password_file", answers.password_file, "~/.secrets/kafka")
    yield _line("ssl_ca", None, "/etc/ssl/kafka-ca.pem")
    yield ""
    yield "# The folder of the log, checkpoints and adapters of a local stack."
    yield _line("home", answers.home)
    yield ""
    yield "# DEBUG, INFO, WARNING or ERROR. Commands: WARNING, processes: INFO."
    yield _line("log", None, "INFO")
    yield ""
    yield "# Other clusters: `tentalis --profile production ...`, `tentalis profile use production`."
    yield "#profiles:"
    yield "#  production:"
    yield "#    bootstrap: kafka.example:9093"
    yield "#    security_protocol: SASL_SSL"
    yield ""
    yield from (f"# {line}" for line in found(machine))


def found(machine: Machine) -> Iterator[str]:
    """Yields what was found on the machine, with the way to use it."""
    gpus = f"{len(machine.gpus)} x {machine.gpus[0]}: `tentalis up --ranks {len(machine.gpus)}`" if machine.gpus else ""
    yield f"GPU: {gpus or 'none: models run on the CPU'}."
    docker = "the engine answers: `docker compose up` runs the same stack in containers"
    yield f"Docker: {docker if machine.docker else 'no engine answers; none is needed'}."
    models = f" with {', '.join(machine.models[:5])}" if machine.models else ""
    ollama = f"at {machine.ollama}{models}" if machine.ollama else "does not answer; none is needed"
    yield f"Ollama: {ollama}."
    keys = f"{', '.join(machine.keys)}; a judge can use one (docs/concepts/judges.md)" if machine.keys else "none"
    yield f"API keys in the environment: {keys}."


def gateway_text(machine: Machine) -> str | None:
    """Returns the text of a gateway's settings with the backends that were found; None if there are none."""
    backends = []
    if machine.ollama and machine.models:
        backends.append(
            f"  - {{name: ollama, url: {json.dumps(machine.ollama)}, models: {json.dumps(machine.models)}, "
            'token_ids: "no"}'
        )
    for key in machine.keys:
        name = key.removesuffix("_API_KEY").lower()
        backends.append(f'  - {{name: {name}, url: "{API_KEYS[key]}", key_env: {key}, token_ids: "no"}}')
    if not backends:
        return None
    return (
        "# Backends of `tentalis serve gateway --config gateway.yaml`, written by `tentalis init`\n"
        "# (docs/concepts/gateway.md). Their answers have no token ids: they are recorded and scored, and not trained\n"
        "# on. A policy needs a server with token ids, such as `tentalis serve model`.\n"
        "backends:\n" + "\n".join(backends) + "\n"
    )


def _line(key: str, value: str | None, example: str = "") -> str:
    """Returns a key with its value, or commented out with an example."""
    return f"#{key}: {example}" if value is None else f"{key}: {json.dumps(value, ensure_ascii=False)}"
