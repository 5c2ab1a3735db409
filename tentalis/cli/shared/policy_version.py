"""The argument that names a version of a policy."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.service.exit_codes import ExitCode


def checked_version(text: str) -> str:
    """Returns the name of a version, or of a policy. Raises CommandError for a text with @ that is not POLICY@vN."""
    from schemas.ids import parse_policy_name

    if "@" in text:
        try:
            parse_policy_name(text)
        except ValueError:
            raise CommandError(f"{text!r} is not a version: write POLICY@vN", ExitCode.USAGE) from None
    return text


PolicyVersion = Annotated[
    str, typer.Argument(help="policy@vN, or a policy for its promoted version.", callback=checked_version)
]
EarlierVersion = Annotated[
    str, typer.Argument(help="policy@vN, or a policy for the version served before.", callback=checked_version)
]
