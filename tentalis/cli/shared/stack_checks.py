"""The checks before a local stack starts, for `tentalis up`, `tentalis demo` and `tentalis learn`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.settings import PROBE_S
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from tentalis.service.settings import Settings

# Seconds after which a consumer group drops processes that were killed and static members that stopped: the session
# timeout (10 s) and a margin.
MEMBERS_LEAVE_S = 15.0


def check_before_start(
    settings: Settings,
    *,
    join: bool = False,
    own_log: bool = False,
    config: Path | None = None,
    kafka: bool = True,
) -> None:
    """Checks the settings of the trainer, that no stack runs in the home, that a named Kafka answers, that no other
    stack works on it unless `join`, and that the disk has room. Without a named Kafka: that the local broker has the
    security that the settings ask for.

    Args:
        own_log: also that the records on that Kafka, if there are any, are of this home.
        config: the trainer's configuration, if there is one already.
        kafka: False if the command uses no Kafka.
    Raises:
        CommandError, ConfigError, BadSecurity, Forbidden, KafkaException.
    """
    from tentalis.local.disk import LEAST, space
    from tentalis.local.state import StateDir
    from trainer.config.file import check_variables, load_config

    # The trainer inherits the environment, whose variables of earlier systems fill in what its file leaves open.
    if config is None:
        check_variables(os.environ)
    else:
        load_config(config, os.environ)

    if StateDir(settings.home).holder() is not None:
        raise CommandError(
            f"a stack already runs in {settings.home}: `tentalis status` shows it, `tentalis down` ends it. Set "
            f"{variables.HOME.name} to another directory for a second one"
        )
    if kafka:
        _check_kafka(settings, join=join, own_log=own_log)
    if shortage := space(settings.home).shortage(LEAST):
        raise CommandError(
            f"{shortage}: the log, checkpoints and adapters need at least {LEAST // 2**20} MiB at the start. "
            "Free disk space, or set TENTALIS_HOME to another state directory"
        )


def _check_kafka(settings: Settings, *, join: bool, own_log: bool) -> None:
    from tentalis.kafka.errors import Unreachable
    from tentalis.kafka.preflight import connect

    if settings.bootstrap is None:
        settings.require_plaintext()
        return
    try:
        connect(settings, PROBE_S)
    except Unreachable as error:
        remedy = "Correct TENTALIS_BOOTSTRAP, or unset it to start a local broker with the stack"
        raise CommandError(f"{error}. {remedy}", ExitCode.UNREACHABLE) from error
    if not join:
        _refuse_another_stack(settings)
    if own_log:
        _refuse_records_of_others(settings)


def _refuse_another_stack(settings: Settings) -> None:
    """Raises CommandError if consumer groups of this namespace have members, after the time in which those of a stack
    that was killed lose them."""
    from tentalis.kafka.admin import KafkaAdmin
    from tentalis.kafka.topology import is_ours

    admin, deadline = KafkaAdmin(settings), time.monotonic() + MEMBERS_LEAVE_S
    while active := [group for group in admin.active_groups() if is_ours(group)]:
        if time.monotonic() > deadline:
            raise CommandError(
                f"another stack works on Kafka at {settings.bootstrap}: the consumer groups {', '.join(active)} have "
                "members. Two stacks would share one log and each would train on a part of it. `tentalis up --join` "
                f"shares the work of that stack; {variables.NAMESPACE.name}=NAME keeps this one apart from it; or stop "
                "the other one"
            )
        time.sleep(0.5)


def _refuse_records_of_others(settings: Settings) -> None:
    """Raises CommandError if there are records in this namespace and the stack of this home never worked in it: it
    would answer the tasks of others, and take their rollouts and versions for its own."""
    from schemas import topics
    from tentalis.kafka.admin import KafkaAdmin
    from tentalis.kafka.offsets import offset_ranges
    from tentalis.local.made_topics import has_made

    if has_made(settings):
        return
    present = {*KafkaAdmin(settings).names()}
    for topic in (topics.TASKS, topics.RESULTS, topics.SESSIONS, topics.ROLLOUTS, topics.RUNS):
        if topic in present and any(end > first for first, end in offset_ranges(settings, topic).values()):
            raise CommandError(
                f"{topic} on Kafka at {settings.bootstrap} has records, and the stack of {settings.home} has never "
                "worked there: they are of others, and this command would process them. "
                f"{variables.NAMESPACE.name}=NAME gives the command topics of its own; {variables.HOME.name} names the "
                "state directory of an earlier run"
            )
