"""The calls of a program that plays an episode: all belong to the session of the episode's key, and are sampled as its
task says. Pure."""

from collections.abc import Mapping
from typing import Any

from schemas.ids import parse_policy_name
from schemas.records import EPISODE_TURN, Sampling
from tentalis.gateway.backends.routing import CallRoute
from tentalis.gateway.calls.session_id import CallSession, DecidedBy
from tentalis.inference.episode_key import EpisodeGrant

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_DROPPED = (
    *("seed", "min_p", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids"),
)


def episode_session(grant: EpisodeGrant) -> CallSession:
    """Returns the session of every call of an episode, whatever session the program names."""
    return CallSession(
        grant.session_id, grant.session_id, EPISODE_TURN, DecidedBy.EPISODE, DecidedBy.EPISODE, done=False
    )


def episode_body(body: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """Returns the body of a call with the sampling of the episode's task.

    The program's own seed would make all samples of a task equal, and its penalties and biases would bend the
    distribution, so they are left out. A turn has at most the tokens that the task allows, or fewer if the program asks
    for fewer. The program's own stop strings, tools and response formats stay; a turn that a grammar constrains is not
    trained on.
    """
    sent = {name: value for name, value in body.items() if name not in _DROPPED}
    asked = [sent.pop(name) for name in _LIMITS if name in sent]
    given = [value for value in asked if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    sent |= {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": min([sampling.max_tokens, *given]),
    }
    if sampling.stop and not sent.get("stop"):
        sent["stop"] = list(sampling.stop)
    return sent


def too_old(route: CallRoute, grant: EpisodeGrant) -> bool:
    """Returns True if this gateway does not know yet that its backend serves the version that the episode needs: none
    is served, or one that is older than the worker's was when the episode began."""
    if route.unserved or route.model is None:
        return route.unserved
    if route.assigned or grant.least_version is None:
        return False
    name, version = parse_policy_name(route.model)
    return name == grant.policy and version < grant.least_version
