"""`tentalis policy assign` and `unassign`: which version answers the tasks of a worker or an environment."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING, Annotated

import typer

from tentalis.cli.shared.decide import decide
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.options import Bootstrap, DryRun, Yes
from tentalis.cli.shared.output import Format, OutputFormat
from tentalis.cli.shared.settings import reached
from tentalis.service.exit_codes import ExitCode

if TYPE_CHECKING:
    from schemas.records import Assignment, AssignmentScope, PolicyUpdate
    from tentalis.policies.view import PolicyView

LATEST = "latest"

Subject = Annotated[
    str,
    typer.Argument(help="A worker's id (also worker:ID), environment:NAME, or shared for all workers and gateways."),
]
InsteadOf = Annotated[
    str | None,
    typer.Option(
        "--instead-of",
        help="Policy of the tasks that it applies to. Default: the assigned policy itself.",
        show_default=False,
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Reason, stored on the log.")]


def assign(
    subject: Subject,
    version: Annotated[str, typer.Argument(help="policy@vN, or policy@latest for the version that is served.")],
    percent: Annotated[
        float, typer.Option("--percent", min=0.0, max=100.0, help="Share of the tasks that it answers, in percent.")
    ] = 100.0,
    instead_of: InsteadOf = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Lets a version answer the tasks of a worker, of an environment, or of all.

    With --percent a share of them: the task's or session's id decides, so that all samples of a task and all turns of a
    session get one version. The other tasks get what is assigned more widely, else the served version. Servers load the
    version; until then, and where they cannot, the served version answers.
    """
    from schemas.records import Assignment
    from tentalis.policies.known_workers import unknown_subject
    from tentalis.text.timestamps import now_ms

    scope, name = parse_subject(subject)
    policy, number = parse_version(version)
    if instead_of is not None and (not instead_of or "@" in instead_of):
        raise CommandError(f"--instead-of {instead_of}: name a policy, without a version", ExitCode.USAGE)
    if percent <= 0:
        raise CommandError(
            f"--percent {percent:g} would answer no task; to end an assignment: tentalis policy unassign {subject}",
            ExitCode.USAGE,
        )
    with reached(bootstrap) as settings:
        from tentalis.policies.view_reader import read_policies

        view = read_policies(settings)
        update = assignable(view, policy, number, instead_of or policy)
        record = Assignment(
            scope=scope,
            subject=name,
            replaces=instead_of or policy,
            policy=policy,
            version=number,
            percent=percent,
            event_time=now_ms(),
            active=True,
            by=f"cli/{getpass.getuser()}",
            reason=reason,
        )
        for warning in _warnings(view, update, record):
            typer.echo(f"warning: {warning}", err=True)
        if unknown := unknown_subject(settings, scope, name):
            typer.echo(f"warning: {unknown}", err=True)
        share = "the" if percent == 100 else f"{percent:g}% of the"
        question = f"Let {record.name} answer {share} tasks of {record.replaces} {_where(record)}"
        decide(settings, [record], question, dry_run, yes, output)


def unassign(
    subject: Subject,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Policy of the tasks. Default: of all assignments of it.", show_default=False),
    ] = None,
    reason: Reason = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    bootstrap: Bootstrap = None,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Ends the assignments of a worker or environment, or the shared ones. Wider ones, or the served version, apply."""
    from tentalis.policies.view_reader import read_policies
    from tentalis.text.timestamps import now_ms

    scope, name = parse_subject(subject)
    with reached(bootstrap) as settings:
        found = [
            each
            for each in read_policies(settings).assignments
            if (each.scope, each.subject) == (scope, name) and policy in (None, each.replaces)
        ]
        if not found:
            of_policy = f" for tasks of {policy}" if policy else ""
            raise CommandError(f"{subject} has no assignment{of_policy}; `tentalis policy list` shows those in force")
        by = f"cli/{getpass.getuser()}"
        ends = {"active": False, "event_time": now_ms(), "by": by, "reason": reason}
        question = "End: " + ", ".join(f"{each.name} for tasks of {each.replaces} {_where(each)}" for each in found)
        decide(settings, [each.model_copy(update=ends) for each in found], question, dry_run, yes, output)


def parse_subject(text: str) -> tuple[AssignmentScope, str]:
    """`ID`, `worker:ID`, `environment:NAME` or `shared` -> scope and subject. Raises CommandError."""
    from schemas.records import AssignmentScope

    if text == AssignmentScope.SHARED.value:
        return AssignmentScope.SHARED, ""
    for scope in (AssignmentScope.WORKER, AssignmentScope.ENVIRONMENT):
        if text.startswith(f"{scope.value}:"):
            text = text.removeprefix(f"{scope.value}:")
            break
    else:
        scope = AssignmentScope.WORKER
    if not text:
        raise CommandError("name a worker's id, environment:NAME, or shared", ExitCode.USAGE)
    return scope, text


def parse_version(text: str) -> tuple[str, int | None]:
    """`policy@vN` or `policy@latest` -> policy and N or None. Raises CommandError."""
    from schemas.ids import parse_policy_name

    policy, _, version = text.rpartition("@")
    if policy and version == LATEST:
        return policy, None
    try:
        return parse_policy_name(text)
    except ValueError:
        raise CommandError(
            f"{text!r} is not a version: write POLICY@vN, or POLICY@{LATEST} for the version that is served",
            ExitCode.USAGE,
        ) from None


def assignable(view: PolicyView, policy: str, number: int | None, replaces: str) -> PolicyUpdate:
    """The update that would answer now. Raises CommandError if it cannot answer tasks of `replaces`."""
    from schemas.ids import policy_name

    if policy not in view.policies:
        raise CommandError(
            f"no version of {policy!r} was published; published policies: {', '.join(view.policies) or 'none'}"
        )
    if number is None and policy not in view.promotions:
        raise CommandError(
            f"no version of {policy} is served: promote one (tentalis policy promote {policy}@vN), or assign a version "
            "by its number"
        )
    update = view.find(policy if number is None else policy_name(policy, number))
    if replaces not in view.policies:
        raise CommandError(
            f"--instead-of {replaces}: no version of it was published; published policies: {', '.join(view.policies)}"
        )
    other = view.find(replaces) if replaces in view.promotions else None
    if other is not None and other.base_sha256 != update.base_sha256:
        raise CommandError(
            f"{update.name} was trained on another base model ({update.base_model}, sha256 {update.base_sha256[:12]}) "
            f"than {other.name}, which is served ({other.base_model}, {other.base_sha256[:12]}): a server of one "
            "cannot load the other. Assign a version of the same base model"
        )
    return update


def _warnings(view: PolicyView, update: PolicyUpdate, record: Assignment) -> list[str]:
    found = []
    if view.state(update) == "refused":
        found.append(f"the guard refused {update.name}: tentalis policy show {update.name}")
    if record.policy != record.replaces:
        found.append(
            f"answers of {record.policy} to tasks of {record.replaces} are scored and recorded, but not trained on: a "
            "trainer uses only samples of its own policy"
        )
    for server, why in sorted(view.refusals.get(update.name, {}).items()):
        found.append(f"the server {server} cannot serve {update.name}: {why}")
    return found


def _where(record: Assignment) -> str:
    return "everywhere" if not record.subject else f"at the {record.scope.value} {record.subject}"
