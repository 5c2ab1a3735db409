"""`tentalis init`: writes a first settings file for this machine, and tests it."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, DryRun, Yes, ask
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings_file import WORKING_FILE, parse, write
from tentalis.service.variable import BadVariable

if TYPE_CHECKING:
    from tentalis.ops.doctor import Finding
    from tentalis.ops.first_settings import Answers
    from tentalis.ops.machine import Machine
    from tentalis.service.settings_file import AppliedSettings

GATEWAY_FILE = Path("gateway.yaml")


def init(
    ctx: typer.Context,
    wizard: Annotated[bool, typer.Option("--wizard", help="Ask instead of taking what is found.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Let `tentalis up` start a broker, even if a Kafka was found.")
    ] = False,
    bootstrap: Bootstrap = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Writes a commented settings file for this machine, tentalis.yaml, and tests it as `tentalis doctor` does.

    Looks for a Kafka, a GPU, Docker, Ollama and API keys. With Ollama or a key of OpenAI or OpenRouter, it also writes
    gateway.yaml, for `tentalis serve gateway --config`. Asks before it replaces a file. Exits with 1 if a test fails.
    """
    from tentalis.ops.first_settings import Answers, found, gateway_text, settings_text
    from tentalis.ops.machine import look_around

    machine = look_around()
    kafka = None if local else bootstrap or machine.kafka
    answers = _asked(machine, kafka) if wizard else Answers(bootstrap=kafka)
    files = {WORKING_FILE: settings_text(answers, machine)}
    if (backends := gateway_text(machine)) is not None:
        files[GATEWAY_FILE] = backends
    values = {
        name: text for name, (text, _) in parse(files[WORKING_FILE], WORKING_FILE.absolute()).values(None).items()
    }
    if not dry_run:
        _write(files, yes=yes)
    applied: AppliedSettings = ctx.find_root().obj
    findings = _tested(values, applied, check_gateway=not dry_run and GATEWAY_FILE in files)
    if output is not OutputFormat.TABLE:
        print_data(
            output,
            {
                "files": {str(path): text for path, text in files.items()},
                "written": not dry_run,
                "found": asdict(machine),
                "checks": [asdict(finding) for finding in findings],
            },
        )
    else:
        _show(files, findings, found(machine), dry_run=dry_run)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(ExitCode.ERROR)


def _asked(machine: Machine, kafka: str | None) -> Answers:
    """Returns the answers of a person; an empty one takes the suggestion."""
    from tentalis.ops.first_settings import Answers

    own = "own"
    servers = _ask("Kafka servers, or `own` for a broker that `tentalis up` starts", kafka or own)
    if servers == own:
        return Answers(home=_ask("Folder of the log, checkpoints and adapters", ".tentalis"))
    _valid(variables.BOOTSTRAP, servers)
    prefix = _ask("Prefix of topics and groups, if others share this Kafka", "none")
    namespace = None if prefix == "none" else _valid(variables.NAMESPACE, prefix)
    protocol = _ask(f"Protocol of the connection ({', '.join(variables.PROTOCOLS)})", variables.PROTOCOLS[0])
    _valid(variables.SECURITY_PROTOCOL, protocol)
    username = password_file = None
    if protocol.startswith("SASL"):
        username = _ask("User", os.environ.get("USER", ""))
        password_file = _ask("File with the password", "~/.secrets/kafka")
    return Answers(
        bootstrap=servers,
        namespace=namespace,
        protocol=protocol,
        username=username,
        password_file=password_file,
    )


def _ask(question: str, suggestion: str) -> str:
    return str(typer.prompt(question, default=suggestion, err=True)).strip()


def _valid(variable: Any, text: str) -> str:
    try:
        variable.parse(text)
    except BadVariable as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    return text


def _write(files: dict[Path, str], *, yes: bool) -> None:
    there = [str(path) for path, text in files.items() if _is_replaced(path, text.encode())]
    if there and not yes:
        ask(f"Replace {' and '.join(there)}?")
    for path, text in files.items():
        write(path.absolute(), text)


def _is_replaced(path: Path, content: bytes) -> bool:
    """True if the path has a file with other content. Raises CommandError for what is not a file, OSError."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(there.st_mode):
        raise CommandError(
            f"{path} is not a file: move it away, or run `tentalis init` in another folder", ExitCode.USAGE
        )
    return there.st_size != len(content) or path.read_bytes() != content


def _tested(values: dict[str, str], applied: AppliedSettings, *, check_gateway: bool) -> list[Finding]:
    """Returns the findings of the doctor, and of the checks before a start, with the new settings."""
    from tentalis.cli.shared.variable_checks import variable_problems
    from tentalis.gateway.settings import BadGateway, GatewaySettings
    from tentalis.ops.doctor import Finding, Level, examine
    from tentalis.service.settings import Settings

    # The values of an earlier file do not count; the rest of the environment takes precedence, as it will.
    around = {name: text for name, text in os.environ.items() if text and name not in applied.origins}
    env = values | around
    problems = variable_problems(env)
    if check_gateway:
        try:
            for backend in GatewaySettings.from_file(GATEWAY_FILE).backends:
                backend.key(env)
        except BadGateway as error:
            problems.append(str(error))
    overridden = [
        Finding(
            Level.WARN,
            "environment",
            f"{name} is set: it takes precedence over {WORKING_FILE}",
            "unset it; the checks here used its value",
        )
        for name in sorted({*values, variables.BOOTSTRAP.name} & around.keys())
        if around[name] != values.get(name)
    ]
    if problems:
        return [*(Finding(Level.FAIL, "settings", each, f"correct {WORKING_FILE}") for each in problems), *overridden]
    return [Finding(Level.OK, "settings", "every setting is valid"), *overridden, *examine(Settings.from_env(env))]


def _show(files: dict[Path, str], findings: list[Finding], found: Any, *, dry_run: bool) -> None:
    if dry_run:
        for path, text in files.items():
            print_text(f"--- {path}", text)
    else:
        print_text(f"wrote {' and '.join(map(str, files))}", "", *found, "")
    print_table(("", "check", "found", "what to do"), [(f.level, f.check, f.found, f.remedy) for f in findings])
    print_text("", "next: `tentalis config show`, then `tentalis up --gateway`, or `tentalis demo`")
