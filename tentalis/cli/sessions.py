"""`tentalis sessions`: lists and shows recorded conversations, and labels their turns."""

from __future__ import annotations

import getpass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.options import Bootstrap, DryRun, Yes, ask
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text, readable, show
from tentalis.cli.shared.settings import reached
from tentalis.cli.shared.turn_text import hint_text, short
from tentalis.service.exit_codes import ExitCode
from tentalis.text.timestamps import written

if TYPE_CHECKING:
    from tentalis.gateway.api.bodies import UserFeedbackBody

app = typer.Typer(help="Recorded conversations: list, show, label.", no_args_is_help=True, rich_markup_mode=None)

LISTED = ("session", "user", "main", "side", "tasks", "policies", "ended", "last")
TURNS = ("turn", "kind", "at", "asked", "answered", "signals", "feedback", "hint", "reward", "trained")
# Outcomes whose reward is not that of their turn.
_BESIDE = ("late", "superseded")


class Thumb(StrEnum):
    UP = "up"
    DOWN = "down"


Session = Annotated[str, typer.Argument(help="Id of a session as on the log: USER/NAME.")]
User = Annotated[
    str | None, typer.Option("--user", help="The session's user, if several have this id.", show_default=False)
]


@app.command("list", short_help="List conversations, newest first.")
def list_sessions(
    user: Annotated[str | None, typer.Option("--user", help="Only sessions of this user.", show_default=False)] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Only sessions that this policy answered.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Only turns since then: RFC 3339, or 30m, 1h, 2d ago.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of rows.")] = 20,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lists conversations with their numbers of main and side turns, and of turns that became tasks."""
    from tentalis.ops.sessions.process import read_sessions

    moment = None if since is None else moment_of("--since", since)
    with reached(bootstrap) as settings:
        view = read_sessions(settings, moment)
    rows = [each.row() for each in view.conversations if user in (None, each.user_id)]
    rows = [row for row in rows if policy is None or policy in row["policies"]][:limit]
    if output is OutputFormat.TABLE:
        rows = [row | {"policies": readable(row["policies"]), "last": written(row["last"])} for row in rows]
    show(output, LISTED, rows)


@app.command("show", short_help="Show the turns of a conversation, and where each was trained.")
def show_session(
    session: Session, user: User = None, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE
) -> None:
    """Shows the turns of a conversation: main or side, signals, feedback, hints with their source, reward, and the
    run, step and version that trained on it. -o json has the whole messages that hints were made from."""
    from tentalis.ops.sessions.core import TurnFacts, turn_details
    from tentalis.ops.sessions.process import read_facts, read_session

    with reached(bootstrap) as settings:
        found = read_session(settings, session, user)
        facts = read_facts(settings, found)
    turns = [turn_details(turn, facts.get(turn.task_id or "", TurnFacts())) for turn in found.turns]
    if output is not OutputFormat.TABLE:
        print_data(output, found.row() | {"turns": turns})
        return
    row = found.row()
    print_table(LISTED, [[written(row["last"]) if name == "last" else readable(row[name]) for name in LISTED]])
    print_text()
    print_table(TURNS, [_turn_row(turn) for turn in turns])


@app.command(short_help="Give a turn a thumb, a score or a comment.")
def label(
    session: Session,
    turn: Annotated[int, typer.Argument(min=0, help="Number of a main turn, as `sessions show` prints it.")],
    thumb: Annotated[Thumb | None, typer.Option("--thumb", help="up or down.", show_default=False)] = None,
    score: Annotated[
        float | None, typer.Option("--score", min=0.0, max=1.0, help="A grade from 0 to 1.", show_default=False)
    ] = None,
    comment: Annotated[str, typer.Option("--comment", help="What the answer should have been.")] = "",
    user: User = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Writes a person's Feedback on a turn, as a POST to /v1/feedback does. The same label has the same id.

    What a label trains depends on the turn's scorer: docs/concepts/judges.md.
    """
    from tentalis.cli.shared.record_json import to_plain
    from tentalis.ops.sessions.core import NoSuchTurn
    from tentalis.ops.sessions.process import label_of, read_session, write_label

    body = _body(thumb, score, comment)
    with reached(bootstrap) as settings:
        found = read_session(settings, session, user)
        try:
            feedback = label_of(settings, found.main_turn(turn), body, f"cli/{getpass.getuser()}")
        except NoSuchTurn as error:
            raise CommandError(str(error)) from error
        what = f"label turn {turn} of {session}: {thumb or ''} {'' if score is None else score} {comment}".strip()
        if not dry_run and not yes:
            ask(f"{what}?")
        if not dry_run:
            write_label(settings, feedback)
    if output is not OutputFormat.TABLE:
        print_data(output, {"type": "Feedback", "value": to_plain(feedback)})
    typer.echo(f"{'would write' if dry_run else 'written'}: {what} ({feedback.feedback_id})", err=True)


def _body(thumb: Thumb | None, score: float | None, comment: str) -> UserFeedbackBody:
    """Returns the label as the body of a request. Raises CommandError if it says nothing."""
    from tentalis.gateway.api.bodies import UserFeedbackBody

    given: dict[str, Any] = {"task_id": "turn"}
    given |= {} if thumb is None else {"thumb": thumb.value}
    given |= {} if score is None else {"score": score}
    given |= {"comment": comment} if comment else {}
    if len(given) == 1:
        raise CommandError("give --thumb, --score, --comment, or several", ExitCode.USAGE)
    return UserFeedbackBody(**given)


def _turn_row(turn: dict[str, Any]) -> list[Any]:
    rewards = [_reward(each) for each in turn["outcomes"] if each["reward"] is not None]
    graded = [f"{each['source']} {each['verdict']}" for each in turn["feedback"] if each["verdict"] != "none"]
    trained = [f"{each['run']} step {each['step']} -> {each['version']}" for each in turn["trained"]]
    return [
        turn["turn"],
        turn["kind"],
        written(turn["at"]),
        short(turn["asked"]),
        short(turn["answered"]),
        " ".join(turn["signals"]) or None,
        "; ".join(graded) or None,
        "; ".join(hint_text(each) for each in turn["hints"]) or None,
        "; ".join(rewards) or None,
        "; ".join(trained) or (turn["no_task"] and f"no: {turn['no_task']}"),
    ]


def _reward(outcome: dict[str, Any]) -> str:
    """The reward of an outcome; "explicit" if a grade decided it, the kind if it is not the reward of its turn, and the
    fate of a grade that came late."""
    explicit = "explicit" if outcome["explicit"] else ""
    kind = outcome["kind"] if outcome["kind"] in _BESIDE else ""
    grade = f"({outcome['grade']})" if outcome["grade"] else ""
    return " ".join(part for part in (str(readable(outcome["reward"])), explicit, kind, grade) if part)
