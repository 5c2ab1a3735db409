"""`tentalis env`: lists environments, shows their tools and limits, and plays one episode in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.environment_options import AllowUnsandboxed, File, MaxTurns, Tasks, Tools
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text, readable, show
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from tentalis.agents.environments import Environment
    from tentalis.agents.environments.gui_task import GuiTask
    from tentalis.agents.environments.swe_instances import SweTask
    from tentalis.agents.environments.terminal_task import TerminalTask

app = typer.Typer(help="Environments: list, show, try, tasks, rows.", no_args_is_help=True, rich_markup_mode=None)

_SHOWN = 60
"""Characters of a prompt and an answer in a table."""
Name = Annotated[str, typer.Argument(help="Name of the environment.")]


@app.command("list", short_help="List the environments with episodes.")
def list_environments(file: File = None, output: Format = OutputFormat.TABLE) -> None:
    """Lists the environments whose tasks are played as episodes, and those of a file of environments, with their
    origin."""
    from tentalis.agents.environments.registry import known_environments

    rows = [{"environment": entry.name, "origin": entry.origin} for entry in known_environments()]
    show(output, ("environment", "origin"), rows)


@app.command("show", short_help="Show the prompt and the wall of an environment.")
def show_environment(
    name: Name,
    question: Annotated[
        str,
        typer.Argument(help="The user's message; for terminal, swe and gui, the name of a task.", show_default=False),
    ] = "...",
    file: File = None,
    tools: Tools = None,
    tasks: Tasks = None,
    allow_unsandboxed: AllowUnsandboxed = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the messages with which an episode begins, and the wall that confines its actions on this machine; of an
    environment of a file also its settings."""
    from tentalis.agents.environments.trial.play import first_messages

    wall, messages = first_messages(_maker(name, tools, tasks, allow_unsandboxed), name, question)
    settings = _settings_in_file(name)
    if output is not OutputFormat.TABLE:
        print_data(output, {"environment": name, **settings, "wall": wall, "messages": messages})
        return
    for key, value in settings.items():
        print_text(f"{key}: {value if isinstance(value, str) else json.dumps(value)}")
    print_text(f"wall: {wall or 'runs no actions'}")
    for message in messages:
        print_text(f"\n[{message['role']}]\n{readable(message['content'])}")


@app.command("try", short_help="Play one episode in the terminal, by hand or with a model.")
def try_environment(
    name: Name,
    question: Annotated[str, typer.Argument(help="The user's message; for gui, swe, terminal: the name of a task.")],
    data: Annotated[str, typer.Option("--data", help="Data of the verifier `episode`, as JSON.")] = "{}",
    server: Annotated[
        str | None,
        typer.Option("--server", help="URL of a model server that plays. Default: you do.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model of the server. Default: its first one.", show_default=False)
    ] = None,
    max_turns: MaxTurns = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of one turn of a model.")] = 512,
    file: File = None,
    tools: Tools = None,
    tasks: Tasks = None,
    allow_unsandboxed: AllowUnsandboxed = False,
) -> None:
    """Plays one episode step by step and prints its score. By hand, a turn is what you type up to an empty line. A
    program of the environment agent calls the model of --server."""
    from tentalis.agents.environments.registry import default_turns
    from tentalis.agents.environments.trial.play import ByHand, ByModel, NotATask, TurnPlayer, play_trial, trial_task

    try:
        task = trial_task(name, question, data)
    except NotATask as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    player: TurnPlayer = ByHand(_typed) if server is None else ByModel(server, model, max_tokens)
    make = _maker(name, tools, tasks, allow_unsandboxed)
    play_trial(make, task, player, max_turns or default_turns(name), lambda text: print_text(readable(text)))


@app.command("tasks", short_help="List the task folders of terminal or gui, or the instances of swe.")
def list_tasks(
    tasks: Annotated[Path, typer.Argument(help="Folder with the task folders or instances.")],
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lists the task folders of terminal or gui or the instances of swe in a folder, each with the digest for `data` of
    the verifier, or with what it needs.

    A task that needs a container, such as for packages or the network, cannot be played.
    """
    from tentalis.agents.environments.gui_task import gui_task_names, is_gui_folder, load_gui_task
    from tentalis.agents.environments.swe_instances import SweFolder, is_swe_folder
    from tentalis.agents.environments.terminal_task import TaskRefused, load_task, task_names

    names: Sequence[str]
    load: Callable[[str], TerminalTask | SweTask | GuiTask]
    if is_swe_folder(tasks):
        instances = SweFolder(tasks)
        names, load = instances.names, instances.task
    elif is_gui_folder(tasks):
        names, load = gui_task_names(tasks), partial(load_gui_task, tasks)
    else:
        names, load = task_names(tasks), partial(load_task, tasks)
    rows = []
    for name in names:
        try:
            rows.append({"task": name, "digest": load(name).digest, "needs": ""})
        except TaskRefused as error:
            rows.append({"task": name, "digest": "", "needs": str(error)})
    show(output, ("task", "digest", "needs"), rows)


@app.command("rows", short_help="Show the data set of an environment of verifiers, or write it as prompts.")
def write_rows(
    name: Name,
    evaluation: Annotated[
        bool, typer.Option("--eval", help="The data set for evaluation; for `tentalis learn --eval`.")
    ] = False,
    file: File = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Shows the data set of an environment of verifiers. With `-o json` each row is one line, as a prompt for `tentalis
    learn`."""
    from tentalis.agents.environments.verifiers import rows_of
    from tentalis.rewards.registry import declared_environments

    declared = declared_environments().get(name)
    if declared is None or declared.base != "verifiers":
        raise CommandError(
            f"{name!r} is no environment of the file of environments with `base: verifiers`: see `tentalis env list`",
            ExitCode.USAGE,
        )
    rows = rows_of(declared, evaluation=evaluation)
    if output is OutputFormat.TABLE:
        shown = ((row["messages"][-1]["content"], row["row"].get("answer")) for row in rows)
        print_table(("prompt", "answer"), ([_short(value) for value in values] for values in shown))
        return
    for row in rows:
        print_data(output, row)


def _short(value: Any) -> str:
    text = readable("-" if value is None else str(value)).replace("\n", " ")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _typed() -> str | None:
    """Returns what a person types up to an empty line; None at the end of the input."""
    print_text("[your turn; end it with an empty line]")
    lines: list[str] = []
    while True:
        try:
            line = input()
        except EOFError:
            return "\n".join(lines) if lines else None
        if not line:
            return "\n".join(lines)
        lines.append(line)


def _maker(name: str, tools: Path | None, tasks: Path | None, allow_unsandboxed: bool) -> Callable[[], Environment]:
    from tentalis.agents.environments.one_answer import OneAnswer
    from tentalis.agents.environments.registry import BadEnvironment, prepared_environment
    from tentalis.rewards.registry import declared_environments

    made = prepared_environment(name, tools=tools, tasks=tasks, allow_unsandboxed=allow_unsandboxed)
    if made is not None:
        return made
    if name in declared_environments():
        return OneAnswer
    raise BadEnvironment(f"no environment {name!r} with episodes: see `tentalis env list`")


def _settings_in_file(name: str) -> dict[str, Any]:
    """Returns the settings of an environment of the file; none for another one."""
    from tentalis.rewards.registry import declared_environments

    declared = declared_environments().get(name)
    if declared is None:
        return {}
    limits = declared.limits.model_dump(exclude_none=True)
    places = {"tools": declared.tools, "tasks": declared.tasks, "python": declared.python}
    return {
        "file": str(declared.file),
        "base": declared.base,
        "scorer": declared.scorer,
        **({"data": dict(declared.data)} if declared.data else {}),
        **({"limits": limits} if limits else {}),
        **({"program": declared.program.model_dump(mode="json", exclude_defaults=True)} if declared.program else {}),
        **{key: str(place) for key, place in places.items() if place is not None},
    }
