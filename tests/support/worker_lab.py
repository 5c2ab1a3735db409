"""The parts of a worker for tests without a broker."""

from tentalis.agents.workers.places import Places
from tentalis.agents.workers.policy_calls import PolicyCalls
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.candidates import Candidates
from tentalis.policies.served import ServedVersions


def policy_calls(
    served: ServedVersions,
    assigned: AssignedVersions | None = None,
    candidates: Candidates | None = None,
    *,
    patience_s: float = 5.0,
    model: str | None = None,
    places: Places | None = None,
) -> PolicyCalls:
    """The calls of worker `w` to server `local`."""
    folds = served, assigned or AssignedVersions(), candidates or Candidates()
    more = {"patience_s": patience_s, "model": model, "places": places}
    return PolicyCalls(*folds, worker_id="w", server_id="local", **more)
