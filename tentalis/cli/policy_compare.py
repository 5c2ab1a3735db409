"""`tentalis policy compare`: the rewards of two versions on the log, with the difference and its interval."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.moment import moment_of
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.cli.shared.policy_version import PolicyVersion
from tentalis.cli.shared.settings import reached


def compare(
    one: PolicyVersion,
    other: PolicyVersion,
    since: Annotated[
        str, typer.Option("--since", help="Outcomes since: RFC 3339, or 30m, 1h, 2d ago.", show_default=False)
    ] = "",
    environment: Annotated[str | None, typer.Option(help="Only tasks of this environment.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only answers of this worker.")] = None,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Compares the rewards of the answers of two versions, from the outcomes on the log.

    The difference is that of the mean task rewards, with a 95% bootstrap interval over tasks. It is that of the
    versions only if both answered the same kind of tasks at the same time, as under `tentalis policy assign --percent`.
    """
    from schemas import topics
    from tentalis.kafka.codec import make_codec
    from tentalis.kafka.reader import records_to_end
    from tentalis.policies.comparison import FEW_TASKS, TaskRewards
    from tentalis.policies.view_reader import read_policies

    start = moment_of("--since", since) if since else None
    with reached(bootstrap) as settings:
        view = read_policies(settings)
        names = [view.find(name).name for name in (one, other)]
        rewards = TaskRewards(since=start, environment=environment, worker=worker)
        for record in records_to_end(settings, [topics.OUTCOMES], make_codec(settings)):
            rewards.apply(record)
    found = rewards.compare(*names)
    if output is not OutputFormat.TABLE:
        print_data(output, found.as_json())
        return
    sides = [(arm.version, arm.tasks, arm.samples, _number(arm.mean)) for arm in (found.one, found.other)]
    print_table(("version", "tasks", "samples", "mean reward"), sides)
    if found.difference is None:
        without = " and ".join(arm.version for arm in (found.one, found.other) if arm.mean is None)
        print_text(f"\nno rewards of {without} match. Versions with rewards: {', '.join(rewards.versions()) or 'none'}")
        return
    print_text(f"\ndifference: {found.difference:+.4f}  [{_number(found.low)}, {_number(found.high)}]", found.method)
    if found.few:
        print_text(f"fewer than {FEW_TASKS} tasks on a side: the interval is too narrow to be relied on")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"
