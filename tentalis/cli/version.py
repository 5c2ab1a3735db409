"""`tentalis version` and `tentalis --version`."""

from __future__ import annotations

from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text


def print_version() -> None:
    """Prints only the version, for `tentalis --version`."""
    from importlib.metadata import version

    print_text(f"tentalis {version('tentalis')}")


def version(output: Format = OutputFormat.TABLE) -> None:
    """Shows the versions of Tentalis, Python and the libraries that affect the results."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    found: dict[str, str | None] = {"tentalis": version_of("tentalis"), "python": platform.python_version()}
    for name in ("confluent-kafka", "faust-streaming", "fastavro", "torch", "transformers", "peft", "deepspeed"):
        try:
            found[name] = version_of(name)
        except PackageNotFoundError:
            found[name] = None
    if output is not OutputFormat.TABLE:
        print_data(output, found)
    else:
        print_table(("package", "version"), list(found.items()))
