"""The parts of a worker for tests without a broker."""

from tentalis.agents.workers.policy_calls import PolicyCalls
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.served import ServedVersions


def policy_calls(
    served: ServedVersions,
    assigned: AssignedVersions | None = None,
    *,
    patience_s: float = 5.0,
    model: str | None = None,
) -> PolicyCalls:
    """The calls of worker `w` to server `local`."""
    assigned = assigned or AssignedVersions()
    return PolicyCalls(served, assigned, worker_id="w", server_id="local", patience_s=patience_s, model=model)
