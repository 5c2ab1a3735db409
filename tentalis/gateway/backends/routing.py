"""Selects the backend and the model that answer a call. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from schemas.ids import parse_policy_name
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.settings import (
    BackendSettings,
    FallbackSettings,
    GatewaySettings,
    PolicySettings,
    TrainableSampling,
)

ServedNameLookup = Callable[[str, str], str | None]
"""(server id, policy) -> `policy@vN` as that server serves it now, or None."""
AssignedNameLookup = Callable[[str, str], str | None]
"""(server id, policy) -> `policy@vN` that an assignment chooses for this call, or None."""


@dataclass(frozen=True, slots=True)
class CallRoute:
    """The destination of a call.

    `policy`: the policy that answers, "" for a plain model; `model`: the name that is sent; `pinned`: the client named
    the version itself; `unserved`: no version is served yet, so the base model answers; `assigned`: an assignment chose
    the version. `fallbacks`: what is asked next if the backend cannot answer. `instead_of`: for a fallback, the model
    that should have answered.
    """

    backend: BackendSettings
    model: str | None
    policy: str = ""
    pinned: bool = False
    unserved: bool = False
    assigned: bool = False
    sampling: TrainableSampling | None = None
    fallbacks: tuple[FallbackSettings, ...] = ()
    instead_of: str | None = None

    @property
    def substitute(self) -> bool:
        """True if another model answers than the one that should."""
        return self.instead_of is not None and self.instead_of != self.model


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
        return _to_policy(by_name[policy.backend], policy, name, served, assigned, base_models)

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
        return CallRoute(
            by_name[policy.backend], model, name, pinned=True, sampling=policy.sampling, fallbacks=policy.fallback
        )
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


def episode_route(
    settings: GatewaySettings,
    name: str,
    *,
    served: ServedNameLookup,
    assigned: AssignedNameLookup,
    base_models: Mapping[str, Sequence[str]],
) -> CallRoute:
    """Returns the route of a call of an episode: to the policy of this name, or to the personal one, without fallbacks:
    an episode has the tokens of its policy alone. Raises APIError (404)."""
    by_name = {backend.name: backend for backend in settings.backends}
    for policy in settings.policies:
        if name in policy.names:
            found = _to_policy(by_name[policy.backend], policy, name, served, assigned, base_models)
            return replace(found, sampling=None, fallbacks=())
    known = ", ".join(sorted(policy.name for policy in settings.policies)) or "none"
    raise APIError(
        404, f"this gateway has no policy {name}, which the episode needs; it has {known}", "not_found_error"
    )


def _to_policy(
    backend: BackendSettings,
    policy: PolicySettings,
    name: str,
    served: ServedNameLookup,
    assigned: AssignedNameLookup,
    base_models: Mapping[str, Sequence[str]],
) -> CallRoute:
    """Returns the route to a policy, or to a personal one of it: to the version that is assigned, else served."""
    assert backend.server_id is not None
    chosen = assigned(backend.server_id, name)
    if chosen is not None:
        answering, _ = parse_policy_name(chosen)
        return CallRoute(backend, chosen, answering, assigned=True, sampling=policy.sampling, fallbacks=policy.fallback)
    version = served(backend.server_id, name)
    base = (base_models.get(backend.name) or (None,))[0]
    return CallRoute(
        backend,
        version or base,
        name,
        unserved=version is None,
        sampling=policy.sampling,
        fallbacks=policy.fallback,
    )


def next_fallback(settings: GatewaySettings, failed: CallRoute, served: ServedNameLookup) -> CallRoute | None:
    """Returns the route of the next fallback that can answer a call whose route has failed; None if there is none.

    A fallback without a model is left out while it serves no version of the policy. A version that the client has named
    itself is answered by nothing else.
    """
    by_name = {backend.name: backend for backend in settings.backends}
    wanted = failed.model if failed.instead_of is None else failed.instead_of
    for at, fallback in enumerate(failed.fallbacks, 1):
        backend = by_name[fallback.backend]
        model = fallback.model or served(backend.server_id or "", failed.policy)
        if model is None or (failed.pinned and model != wanted):
            continue
        return replace(
            failed,
            backend=backend,
            model=model,
            fallbacks=failed.fallbacks[at:],
            instead_of=wanted or "",
            assigned=False,
        )
    return None


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
