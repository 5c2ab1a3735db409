"""`tentalis status`: shows the processes of the local stack, or the state of a deployment on any cluster."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tentalis.cli.shared.errors import explain
from tentalis.cli.shared.options import Bootstrap
from tentalis.cli.shared.output import Format, OutputFormat, first_line, print_data, print_table, print_text
from tentalis.cli.shared.settings import connected_settings, resolve_settings
from tentalis.cli.shared.step_times import StepTimesAnswer, StepTimesWatch
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.stdout import data

if TYPE_CHECKING:
    from tentalis.ops.cluster_status import ClusterStatus
    from tentalis.service.settings import Settings
    from tentalis.service.settings_file import AppliedSettings

# A status older than this is reported as stale: the supervisor writes it every second.
STALE_S = 15.0
# Seconds between two looks at the local stack, and at a cluster.
LOCAL_S, CLUSTER_S = 1.0, 3.0
# Seconds between two questions for lost topics, and for an answer.
LOST_EVERY_S, LOST_WITHIN_S = 30.0, 15.0
# The terminal's sequence that clears the screen and moves the cursor to its beginning.
CLEAR = "\x1b[2J\x1b[H"

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Show it again every few seconds, until Ctrl-C.")]


def status(
    ctx: typer.Context, watch: Watch = False, bootstrap: Bootstrap = None, output: Format = OutputFormat.TABLE
) -> None:
    """Shows the processes of the local stack. Each port serves /healthz, /readyz and /metrics.

    With --bootstrap-server or --profile, or if no stack runs here and a Kafka is configured: shows the deployment on
    that cluster, wherever its processes run: missing topics, the members and the lag of each application, and the
    served policies.

    With --watch: also where the time of the last steps of each run goes.

    Exits with 1 if no stack runs, the supervisor does not answer, the disk is full, or a process is degraded,
    unresponsive, crash-looping, failed or halted (docs/operations/processes.md); for a cluster, if a topic is missing,
    an application that the loop needs has no member, or no server has the promoted version; for both, if an application
    has lost a topic, or the broker does not tell whether one has."""
    settings = resolve_settings(bootstrap, join_stack=False)
    applied: AppliedSettings = ctx.find_root().obj
    named = bootstrap or (ctx.find_root().params.get("profile") and applied.origins.get(variables.BOOTSTRAP.name))
    on_cluster = bool(named) or (settings.bootstrap is not None and not _found(settings.home)["running"])
    lost = LostTopics(resolve_settings(bootstrap))
    steps = StepTimesWatch(lambda: resolve_settings(bootstrap)) if watch else None
    try:
        while True:
            trouble = (
                _look_at_cluster(bootstrap, lost, output, steps)
                if on_cluster
                else _look_at_stack(settings.home, lost, output, steps)
            )
            if steps is None:
                break
            time.sleep(CLUSTER_S if on_cluster else LOCAL_S)
    finally:
        if steps is not None:
            steps.close()
    if trouble:
        raise typer.Exit(ExitCode.ERROR)


@dataclass(frozen=True, slots=True)
class LostTopicsAnswer:
    """Descriptions of the topics that applications have lost, or the reason why they are unknown."""

    losses: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def in_trouble(self) -> bool:
        """True if a topic is lost, or may be."""
        return bool(self.losses or self.unknown)

    def fields(self) -> dict[str, Any]:
        """Returns the fields for programs: `lost_topics` is None if they are unknown."""
        known = None if self.unknown else list(self.losses)
        return {"lost_topics": known, "lost_topics_unknown": self.unknown or None}


class LostTopics:
    """The topics that applications of a stack have lost, looked up at most once per interval."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._answer = LostTopicsAnswer()
        self._asked = -LOST_EVERY_S

    def found(self) -> LostTopicsAnswer:
        """Describes each of them."""
        if self._settings.bootstrap and time.monotonic() - self._asked >= LOST_EVERY_S:
            self._answer, self._asked = _ask_for_lost_topics(self._settings), time.monotonic()
        return self._answer


def _ask_for_lost_topics(settings: Settings) -> LostTopicsAnswer:
    from queue import Empty, SimpleQueue
    from threading import Thread

    from confluent_kafka import KafkaException

    from tentalis.kafka.errors import Forbidden
    from tentalis.kafka.topic_client import CommitsUnknown
    from tentalis.ops.lost_topics import lost_topics

    answers = SimpleQueue[LostTopicsAnswer]()

    def ask() -> None:
        try:
            answers.put(LostTopicsAnswer(tuple(lost_topics(settings))))
        except KafkaException as error:
            answers.put(LostTopicsAnswer(unknown=error.args[0].str()))
        except (Forbidden, CommitsUnknown) as error:
            answers.put(LostTopicsAnswer(unknown=str(error)))
        except TimeoutError:
            answers.put(LostTopicsAnswer(unknown="the broker did not answer in time"))
        except Exception as error:  # noqa: BLE001 - shown with the processes, and the command exits with 1
            answers.put(LostTopicsAnswer(unknown=f"{type(error).__name__}: {error}"))

    # A broker that is frozen answers after minutes, and the processes are to be shown before.
    Thread(target=ask, name="lost-topics", daemon=True).start()
    try:
        return answers.get(timeout=LOST_WITHIN_S)
    except Empty:
        return LostTopicsAnswer(unknown=f"the broker did not answer within {LOST_WITHIN_S:g} s")


def _show_lost(lost: LostTopicsAnswer) -> None:
    if lost.unknown:
        print_text(f"\nlost topics: unknown ({lost.unknown}). `tentalis doctor` looks for the cause")
    for loss in lost.losses:
        print_text(f"\nlost topic: {loss} (docs/operations/lost-topics.md)")


def _clear(output: OutputFormat, watch: bool) -> None:
    if watch and output is OutputFormat.TABLE and data().isatty():
        data().write(CLEAR)


def _look_at_cluster(
    bootstrap: str | None, lost: LostTopics, output: OutputFormat, steps: StepTimesWatch | None
) -> bool:
    """Prints the state of a cluster; returns True if there is trouble. While watching, an absent broker is shown."""
    from confluent_kafka import KafkaException

    from tentalis.kafka.errors import Unreachable
    from tentalis.ops.cluster_status import read_cluster

    try:
        found = read_cluster(connected_settings(bootstrap))
    except (Unreachable, KafkaException, TimeoutError) as error:
        if steps is None:
            raise
        _clear(output, watch=True)
        message, _ = explain(error)
        typer.echo(f"error: {message}", err=True)
        return True
    losses = lost.found()
    _clear(output, steps is not None)
    _show_cluster(found, losses, output, None if steps is None else steps.answer)
    return found.in_trouble or losses.in_trouble


def _show_cluster(
    found: ClusterStatus, lost: LostTopicsAnswer, output: OutputFormat, times: StepTimesAnswer | None
) -> None:
    from tentalis.ops.cluster_status import REPLACED

    if output is not OutputFormat.TABLE:
        print_data(output, asdict(found) | lost.fields() | ({} if times is None else times.fields()))
        return
    if found.missing_topics:
        count = len(found.missing_topics)
        print_text(f"{found.bootstrap} answers, and {count} topics are missing: `tentalis topics plan` lists them")
        _show_lost(lost)
        return
    print_table(
        ("application", "state", "members", "lag", "group"),
        [(each.application, each.state, each.members, each.records, each.group) for each in found.applications],
    )
    replaced = sum(each.state == REPLACED for each in found.applications)
    if replaced:
        print_text(
            f"\n{replaced} workers were replaced, and their own groups are left: `tentalis groups delete "
            "--replaced-workers` lists them"
        )
    print_text()
    print_table(
        ("served version", "run", "step", "served by"),
        [(each.version, each.run, each.step, each.served_by) for each in found.policies],
    )
    if times is not None:
        times.show()
    print_text(f"\nKafka at {found.bootstrap}: every topic is there")
    _show_lost(lost)


def _look_at_stack(home: Path, lost: LostTopics, output: OutputFormat, steps: StepTimesWatch | None) -> bool:
    """Prints the state of the local stack; returns True if there is trouble."""
    found = _found(home)
    losses = lost.found() if found["running"] else LostTopicsAnswer()
    _clear(output, steps is not None)
    _show(home, found, losses, output, None if steps is None else steps.answer)
    return losses.in_trouble or _in_trouble(found)


def _found(home: Path) -> dict[str, Any]:
    from tentalis.local.disk import FULL, space
    from tentalis.local.state import StateDir

    found: dict[str, Any] = StateDir(home).status() or {"running": False, "processes": {}}
    age = time.time() - found["updated"] if found["running"] else 0.0
    # The shortage is measured here: on a full disk the supervisor cannot write its status.
    shortage = space(home).shortage(FULL)
    return {"home": str(home), "shortage": shortage, "stale_s": round(age) if age > STALE_S else None, **found}


def _in_trouble(found: dict[str, Any]) -> bool:
    from tentalis.local.states import TROUBLED

    if not found["running"] or found["shortage"] or found["stale_s"]:
        return True
    return any(process["state"] in TROUBLED for process in found["processes"].values())


def _show(
    home: Path, found: dict[str, Any], lost: LostTopicsAnswer, output: OutputFormat, times: StepTimesAnswer | None
) -> None:
    if output is not OutputFormat.TABLE:
        print_data(output, found | lost.fields() | ({} if times is None else times.fields()))
        return
    if not found["running"]:
        print_text(f"no stack runs in {home}: `tentalis up` starts one; TENTALIS_BOOTSTRAP names a cluster to show")
    else:
        print_table(
            ("process", "state", "pid", "port", "uptime", "restarts", "last exit", "message"),
            [
                (
                    name,
                    p["state"],
                    p["pid"],
                    p.get("port"),
                    _seconds(p["uptime"]),
                    p["restarts"],
                    p["last_exit"],
                    first_line(p["message"]) or None,
                )
                for name, p in found["processes"].items()
            ],
        )
        if found.get("port"):
            print_text(f"\nsupervisor: process {found['supervisor']}, metrics on port {found['port']}")
        if found["stale_s"]:
            print_text(
                f"\nthis status was written {found['stale_s']} s ago: the supervisor (process {found['supervisor']}) "
                "has not updated it since"
            )
        if times is not None:
            times.show()
        _show_lost(lost)
    if found["shortage"]:
        print_text(f"\n{found['shortage']}: free disk space, and waiting processes continue automatically")


def _seconds(uptime: float | None) -> str | None:
    return None if uptime is None else f"{uptime:.0f} s"
