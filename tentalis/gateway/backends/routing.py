"""Selects the backend and the model that answer a call. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from schemas.ids import parse_policy_name
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.settings import BackendSettings, GatewaySettings, PolicySettings, TrainableSampling

ServedNameLookup = Callable[[str, str], str | None]
"""(server id, policy) -> `policy@vN` as that server serves it now, or None."""
AssignedNameLookup = Callable[[str, str], str | None]
"""(server id, policy) -> `policy@vN` that an assignment chooses for this call, or None."""


@dataclass(frozen=True, slots=True)
class CallRoute:
    """The destination of a call.

    `policy`: the policy that answers, "" for a plain model; `model`: the name that is sent; `pinned`: the client named
    the version itself; `unserved`: no version is served yet, so the base model answers; `assigned`: an assignment chose
    the version.
    """

    backend: BackendSettings
    model: str | None
    policy: str = ""
    pinned: bool = False
    unserved: bool = False
    assigned: bool = False
    sampling: TrainableSampling | None = None


def route(
    settings: GatewaySettings,
    model: str | None,
    *,
    user_id: str,
    worker_id: str,
    served: ServedNameLookup,
    assigned: AssignedNameLookup,
    base_models: Mapping[str, Sequence[str]],
) -> CallRoute:
    """Returns the route of a call that asks for `model`.

    Tries in this order: a version by its name (`policy@vN`), a policy by its name, a base model, the patterns of the
    policies. Without a model: the first policy or backend. `base_models`: by backend; the first is its default. Raises
    APIError (404) for a model that is not served.
    """
    by_name = {backend.name: backend for backend in settings.backends}

    def to_policy(policy: PolicySettings, name: str) -> CallRoute:
        backend = by_name[policy.backend]
        assert backend.server_id is not None
        chosen = assigned(backend.server_id, name)
        if chosen is not None:
            answering, _ = parse_policy_name(chosen)
            return CallRoute(backend, chosen, answering, assigned=True, sampling=policy.sampling)
        version = served(backend.server_id, name)
        base = (base_models.get(backend.name) or (None,))[0]
        return CallRoute(backend, version or base, name, unserved=version is None, sampling=policy.sampling)

    def route_personal(policy: PolicySettings) -> CallRoute:
        backend = by_name[policy.backend]
        assert backend.server_id is not None
        for personal_policy in (policy.users.get(user_id), policy.workers.get(worker_id)):
            if personal_policy is not None and served(backend.server_id, personal_policy) is not None:
                return to_policy(policy, personal_policy)
        return to_policy(policy, policy.name)

    if model is None:
        if settings.policies:
            return route_personal(settings.policies[0])
        first = settings.backends[0]
        return CallRoute(first, (base_models.get(first.name) or (None,))[0])
    if (pinned := _pinned(settings, model, user_id, worker_id)) is not None:
        policy, name = pinned
        return CallRoute(by_name[policy.backend], model, name, pinned=True, sampling=policy.sampling)
    for policy in settings.policies:
        if model == policy.name:
            return route_personal(policy)
    for backend in settings.backends:
        if model in base_models.get(backend.name, ()):
            return CallRoute(backend, model)
    for policy in settings.policies:
        if any(fnmatchcase(model, pattern) for pattern in policy.models):
            return route_personal(policy)
    known = sorted({p.name for p in settings.policies} | {m for models in base_models.values() for m in models})
    raise APIError(404, f"the model {model!r} is not served here; available: {', '.join(known)}", "not_found_error")


def _pinned(settings: GatewaySettings, model: str, user_id: str, worker_id: str) -> tuple[PolicySettings, str] | None:
    """The policy of a version's name. A personal policy matches only for its own user or worker."""
    try:
        name, _ = parse_policy_name(model)
    except ValueError:
        return None
    for policy in settings.policies:
        if name in (policy.name, policy.users.get(user_id), policy.workers.get(worker_id)):
            return policy, name
    return None
