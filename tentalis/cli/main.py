"""The `tentalis` command: the list of commands and groups. Each is a module, imported when the command is called."""

import sys
import traceback
from typing import Annotated, Any

import typer

from tentalis.cli.shared.deferred import CommandGroup, DeferredCommand
from tentalis.cli.shared.errors import explain
from tentalis.cli.shared.startup import (
    STARTING,
    check_namespace,
    hold_if_wanted,
    profile_first,
    report_skipped_records,
    settings_file,
    warn_of_misspelt_variables,
)
from tentalis.service import stdout
from tentalis.service.exit_codes import ExitCode

COMMANDS = (
    ("demo", "tentalis.cli.demo:demo", "Run the whole loop with simulated users."),
    ("learn", "tentalis.cli.learn:learn", "Train on your prompts with your reward function."),
    ("init", "tentalis.cli.init:init", "Write settings for this machine, and test them."),
    ("up", "tentalis.cli.up:up", "Start the local stack."),
    ("down", "tentalis.cli.down:down", "Stop the local stack and keep its data."),
    ("status", "tentalis.cli.status:status", "Show the processes of the local stack."),
    ("restart", "tentalis.cli.restart:restart", "Restart processes of the local stack."),
    ("stop", "tentalis.cli.stop:stop", "Stop processes of the local stack."),
    ("start", "tentalis.cli.start:start", "Start stopped processes of the local stack."),
    ("logs", "tentalis.cli.logs:logs", "Show the logs of processes."),
    ("log-level", "tentalis.cli.log_level:log_level", "Change the log level of a running process."),
    ("events", "tentalis.cli.events:events", "Show the history of processes: restarts, errors."),
    ("observe", "tentalis.cli.observe:observe", "Write Prometheus and Grafana settings for the stack."),
    ("replay", "tentalis.cli.replay:replay", "Train a run again and compare every step."),
    ("rescore", "tentalis.cli.rescore:rescore", "Score the answers of a run again."),
    ("export", "tentalis.cli.export:export", "Export a run to files."),
    ("import", "tentalis.cli.import_:import_", "Import an exported run."),
    ("attachments", "tentalis.cli.attachments:app", "Files that episodes left: list, get."),
    ("verify", "tentalis.cli.verify:verify", "Check a run for lost, duplicate or mixed records."),
    ("forget", "tentalis.cli.forget:forget", "Erase a user or session: redact rollouts, delete state."),
    ("rollouts", "tentalis.cli.rollouts:app", "Rollouts and their rewards: list, show, query by SQL."),
    ("runs", "tentalis.cli.runs:app", "Training runs: list, show, compare, delete."),
    ("sessions", "tentalis.cli.sessions:app", "Recorded conversations: list, show, label."),
    ("gateway", "tentalis.cli.gateway:app", "Requests of a gateway, live, with what is learned."),
    ("topics", "tentalis.cli.topics:app", "Topics and ACLs: list, compare with the table, apply, trim."),
    ("state", "tentalis.cli.state:app", "State of stream applications: rebuild it from the log."),
    ("groups", "tentalis.cli.groups:app", "Consumer groups: list, describe, lag, reset, skip, delete."),
    ("schemas", "tentalis.cli.schemas:app", "Avro schemas: check, list, show, register, fingerprint."),
    ("consume", "tentalis.cli.consume:consume", "Show records of a topic."),
    ("produce", "tentalis.cli.produce:produce", "Write records to a topic from JSON."),
    ("dlq", "tentalis.cli.dlq:app", "Dead letters: list, show, replay, drop."),
    ("policy", "tentalis.cli.policy:app", "Policy versions: list, compare, promote, roll back, pin."),
    ("keys", "tentalis.cli.keys:app", "API keys of the gateway: create, limit, usage, revoke."),
    ("serve", "tentalis.cli.serve.app:app", "Run one process of the stack."),
    ("worker", "tentalis.cli.serve.worker:worker", "Answer tasks with the newest policy."),
    ("env", "tentalis.cli.env:app", "Environments: list, show, try one in the terminal."),
    ("manager", "tentalis.cli.serve.manager:manager", "Send tasks, and feedback of simulated users."),
    ("train", "tentalis.cli.train:train", "Train on rollouts and publish adapters."),
    ("size", "tentalis.cli.size:size", "Calculate what a load needs."),
    ("config", "tentalis.cli.config:app", "Settings: show their values and origins, list, check."),
    ("profile", "tentalis.cli.profile:app", "Profiles of the settings file: list, show, use."),
    ("doctor", "tentalis.cli.doctor:doctor", "Check this installation and suggest fixes."),
    ("version", "tentalis.cli.version:version", "Show the versions of Tentalis and its libraries."),
)
"""The commands in the order of `tentalis --help`: name, place, short help. Each is imported when it is called."""

# Exit codes from here on are 128 + the number of a signal, as in a shell.
SIGNALLED = 128


def _debug() -> bool:
    from tentalis.service import variables
    from tentalis.service.variable import BadVariable

    try:
        return variables.DEBUG.read()
    except BadVariable:
        return True  # it is set: the error may be about it


class Commands(CommandGroup):
    """Turns an exception into one line on stderr and an exit code; TENTALIS_DEBUG=1 shows the traceback too."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update({name: DeferredCommand(name, place, short) for name, place, short in COMMANDS})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes `--profile NAME` from any place of the command line: it holds for every command."""
        try:
            args = profile_first(args)
        except ValueError as error:
            if not ctx.resilient_parsing:  # a completion: the name is what is asked for
                ctx.fail(str(error))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            stdout.reserve()
            with settings_file(ctx.params["profile"]) as ctx.obj:
                warn_of_misspelt_variables()
                check_namespace()
                return super().invoke(ctx)
        except typer.Exit as ended:
            hold_if_wanted(ctx, ended.exit_code)
            raise
        except (typer.Abort, typer.TyperException, BrokenPipeError):
            raise
        except Exception as error:
            if _debug():
                traceback.print_exc()
            message, code = explain(error)
            print(f"error: {message}", file=sys.stderr)
            hold_if_wanted(ctx, code)
            raise typer.Exit(code) from error
        finally:
            report_skipped_records()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuses bad settings of a command that starts processes, before its options are read from variables. Other
        commands end, and then name the records that they skipped."""
        found = super().resolve_command(ctx, args)
        if ctx.resilient_parsing or {"-h", "--help"} & {*args}:
            return found
        if found[0] in STARTING:
            from tentalis.cli.shared.variable_checks import refuse_bad_variables

            refuse_bad_variables()
        else:
            from tentalis.kafka.skipped import ALL

            for each in ALL:
                each.wait_for_report()
        return found


app = typer.Typer(
    cls=Commands,
    name="tentalis",
    help="Agents that learn from being used, on Kafka, replayable to the byte.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=f"Exit codes: {', '.join(f'{int(code)} {code.summary}' for code in ExitCode if code < SIGNALLED)}. "
    "TENTALIS_DEBUG=1 prints tracebacks. --profile may stand anywhere.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tentalis.cli.version import print_version

        print_version()
        raise typer.Exit


@app.callback()
def root(
    print_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="NAME", help="Profile of the settings file.", show_default=False)
    ] = None,
) -> None:
    """Global options."""
