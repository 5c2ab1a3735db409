"""Detects misspelt TENTALIS_* variables, which would silently count as unset."""

import difflib
import re
from collections.abc import Mapping

from tentalis.service.variables import LISTED, NAMES, PREFIX

_NEAR = 0.68
# Variables that Kubernetes sets in a pod for a service whose name begins with `tentalis`.
_LINK_NAME, _LINK_VALUE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_"), re.compile(r"(tcp|udp|sctp)://")


def misspelt(env: Mapping[str, str]) -> list[str]:
    """Returns a warning for each variable whose name is close to a known one. Other unknown names are accepted: they
    may be the user's own, such as the variable of a key that a settings file names."""
    names = sorted(name.removeprefix(PREFIX) for name in NAMES if name.startswith(PREFIX))
    known, found = {each.name for each in LISTED}, []
    for name, value in env.items():
        if not name.startswith(PREFIX) or name in known or kubernetes_link(name, value):
            continue
        near = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=_NEAR)
        found += [f"{name} is set, but unknown: did you mean {PREFIX}{each}?" for each in near]
    return found


def kubernetes_link(name: str, value: str) -> bool:
    """True for a variable that Kubernetes sets for a service."""
    return bool(_LINK_NAME.search(name) or _LINK_VALUE.match(value))
