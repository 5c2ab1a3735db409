"""`tentalis doctor` and `tentalis version`."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.common import ERROR, Bootstrap, Format, Output, print_json, print_table, resolve_settings


def print_version() -> None:
    """The version alone, as `tentalis --version` has it."""
    from importlib.metadata import version

    print(f"tentalis {version('tentalis')}")


def version(output: Format = Output.TABLE) -> None:
    """The versions of Tentalis, Python and the libraries that decide what bytes come out."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    found: dict[str, str | None] = {"tentalis": version_of("tentalis"), "python": platform.python_version()}
    for name in ("confluent-kafka", "faust-streaming", "fastavro", "torch", "transformers", "peft", "deepspeed"):
        try:
            found[name] = version_of(name)
        except PackageNotFoundError:
            found[name] = None
    if output is Output.JSON:
        print_json(found)
    else:
        print_table(("package", "version"), list(found.items()))


def doctor(
    bootstrap: Bootstrap = None,
    output: Format = Output.TABLE,
    policy_model: Annotated[
        str | None, typer.Option("--policy-model", help="Look for this model instead of the default one.")
    ] = None,
) -> None:
    """What is missing on this machine, and what to do about it. Exits with 1 if something needed is missing."""
    from dataclasses import asdict

    from tentalis.doctor import Level, examine

    findings = examine(resolve_settings(bootstrap), policy_model)
    if output is Output.JSON:
        print_json([asdict(finding) for finding in findings])
    else:
        print_table(("", "check", "found", "what to do"), [(f.level, f.check, f.found, f.remedy) for f in findings])
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(ERROR)
