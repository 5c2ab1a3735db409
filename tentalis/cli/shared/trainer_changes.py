"""Applies the trainer settings of `--set`, for the commands that begin a run."""

from __future__ import annotations

from typing import Any

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.set_option import parse_changes
from tentalis.service.exit_codes import ExitCode


def configured(config: dict[str, Any], changes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the trainer's settings with the changes of --set, without the defaults. Raises CommandError."""
    from trainer.config.file import override_settings
    from trainer.config.trainer_config import ConfigError, TrainerConfig

    if not changes:
        return config
    try:
        changed = override_settings(TrainerConfig.model_validate(config), parse_changes(changes), "--set")
    except ConfigError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    return changed.model_dump(mode="json", exclude_unset=True)


def check_changes(changes: tuple[str, ...]) -> None:
    """Checks the changes of --set before anything is downloaded or started. Raises CommandError."""
    configured(dict.fromkeys(("run_id", "policy", "base_model", "base_model_name"), "checked"), changes)
