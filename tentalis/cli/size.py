"""`tentalis size`: calculates what a load needs."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.output import Format, OutputFormat, print_data, print_table, print_text
from tentalis.service.exit_codes import ExitCode

TITLES = {
    "broker_in_mb_per_second": "MB/s into the broker",
    "broker_written_mb_per_second": "MB/s written, all replicas",
    "broker_sent_mb_per_second": "MB/s sent, replication included",
    "storage_tb_replicated": "TB stored by retention, all replicas",
    "join_open_gb": "GB of open tasks (join)",
    "join_open_gb_per_worker": "GB of open tasks per join worker",
    "join_closed_gb_in_memory": "GB of remembered tasks in memory",
    "join_closed_gb_on_disk": "GB of remembered tasks on disk (--state rocksdb)",
    "teacher_tokens_per_second": "tokens/s of the teacher (prefill)",
    "trainer_tokens_per_second": "tokens/s of the trainer",
}


def size(
    tasks_per_second: Annotated[float, typer.Option("--tasks-per-second", help="Samples per second.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of a sample, prompt and answer.")] = 1000,
    hints: Annotated[float, typer.Option("--hints", help="Share of the samples with an accepted hint.")] = 0.5,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds that a task waits for its hint.")] = 30.0,
    remember: Annotated[
        float,
        typer.Option("--remember", min=0, help="Hours for which the join remembers a closed task (--marker-ttl)."),
    ] = 24.0,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Replication factor of the topics.")] = 3,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Calculates workers, partitions, throughput, storage, state and tokens per second for a load.

    The figures per task were measured on two cores (docs/operations/scale.md); a larger load is an extrapolation.
    """
    from tentalis.ops.size import BadLoad, Load, size_of

    try:
        found = size_of(Load(tasks_per_second, tokens, hints, wait, remember, replicas))
    except BadLoad as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    if output is not OutputFormat.TABLE:
        print_data(output, found.as_dict())
        return
    rows: list[tuple[object, ...]] = [
        (name, _short(v["cores"]), int(v["workers"]), f"{v['busy']:.0%}") for name, v in found.applications.items()
    ]
    rows += [(name, "not measured", "", "") for name in found.not_measured]
    print_table(("application", "cores", "workers", "busy"), rows)
    print_text("\nOf the gateway: one call per task, not streamed. What is not measured needs cores too.")
    print_text(f"\npartitions of the keyed topics: {found.partitions}, for the life of the major version\n")
    heads = ("topic", "KB per task", "MB/s", "days", "TB")
    print_table(
        heads, [(t.topic, _short(t.kb_per_task), _short(t.mb_per_second), t.days, _short(t.tb)) for t in found.topics]
    )
    print_text()
    print_table(("what", "value"), [(title, _short(found.totals[name])) for name, title in TITLES.items()])


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
