"""Asks for and writes decisions about policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tentalis.cli.shared.options import ask
from tentalis.cli.shared.output import OutputFormat, print_data

if TYPE_CHECKING:
    from schemas.records import Record
    from tentalis.service.settings import Settings


def decide(
    settings: Settings, records: Sequence[Record], question: str, dry_run: bool, yes: bool, output: OutputFormat
) -> None:
    """Writes records to tentalis.policies.v1 after a confirmation; `dry_run` only shows them, `yes` does not ask."""
    from schemas import topics
    from tentalis.kafka.codec import make_codec
    from tentalis.kafka.producer import Publisher

    if not dry_run and not yes:
        ask(f"{question}?")
    if not dry_run:
        publisher = Publisher(settings, "tentalis/cli", make_codec(settings))
        for record in records:
            publisher.send(topics.POLICIES, record)
        publisher.flush()
    if output is OutputFormat.TABLE:
        typer.echo(f"{'would write' if dry_run else 'written'}: {question}", err=True)
    else:
        print_data(output, [record.model_dump(mode="json") for record in records])
