"""Command lines of the system before this one, with the commands that replace them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

SETTINGS = {"--model": "base_model", "--batch-size": "batch_rollouts", "--device": "device"}
"""Options of its `train` that are settings of the trainer's file here."""


def replacement(command: str, arguments: Sequence[str]) -> str | None:
    """Returns the answer to a command line of the earlier system; None for one of this system.

    >>> replacement("train", ["--config", "trainer.yaml"])
    """
    given = _options(arguments)
    if command == "serve" and {"--docker", "--services"} & given.keys():
        return (
            "`serve --docker --services` is a command of an earlier system. The whole stack, the gateway included, is "
            "`tentalis up --gateway`, without Docker; one process of it is `tentalis serve NAME`"
        )
    if command == "init" and {"--model", "--config-dir"} & given.keys():
        model = f" --policy-model {given['--model']}" if given.get("--model") else ""
        return (
            "`init` with --model or --config-dir is a command of an earlier system. `tentalis init` writes "
            "tentalis.yaml into this folder; the model is an option of the start: "
            f"`tentalis up{model or ' --policy-model MODEL'}`"
        )
    if command == "train" and {"--backend", "--env", *SETTINGS} & given.keys():
        return _train(given)
    return None


def _train(given: dict[str, str]) -> str:
    settings = [f"{SETTINGS[option]}: {value or '...'}" for option, value in given.items() if option in SETTINGS]
    if given.get("--backend") == "dapo":  # the other backends have no counterpart: there is one trainer
        settings.insert(0, "loss: dapo")
    file = f" with {', '.join(settings)} in FILE" if settings else ""
    worker = ""
    if "--env" in given:
        worker = ". The environment belongs to the worker: `tentalis worker --help`"
    return (
        "`train` with --backend, --env, --model, --batch-size or --device is a command of an earlier system. Its "
        f"settings are in a file: `tentalis train --config FILE`{file}; `tentalis train --print-config` prints a "
        f"template{worker}"
    )


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the options with the values that follow them, as `--name value` or `--name=value`."""
    found: dict[str, str] = {}
    for position, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            found[name] = value if equals else "" if following.startswith("-") else following
    return found
