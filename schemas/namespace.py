"""The namespace of this process: a prefix of the names of topics, consumer groups and transactional ids.

It is read once, when `schemas.topics` is imported, so that every name of a process has the same prefix. Without a
namespace, names begin with `tentalis`; in the namespace `staging`, with `staging.tentalis`.
"""

import re
from collections.abc import Mapping

PRODUCT = "tentalis"
VARIABLE = "TENTALIS_NAMESPACE"
ALLOWED = f"1 to 60 of a-z, 0-9, dots and hyphens, with a letter or digit first and last, and without {PRODUCT!r} in it"


class BadNamespace(ValueError):
    """A namespace that cannot be a prefix of names. The message names the variable and what is allowed."""


def checked(namespace: str) -> str:
    """Returns the namespace if it is valid. Raises BadNamespace."""
    # With the product's name in it, the ACLs on the prefix of one namespace could cover another one.
    valid = re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,58}[a-z0-9])?", namespace) is not None
    if not valid or ".." in namespace or PRODUCT in namespace:
        raise BadNamespace(f"{VARIABLE}={namespace}: give {ALLOWED}")
    return namespace


def prefix_of(env: Mapping[str, str]) -> str:
    """Returns the beginning of all names in an environment. Raises BadNamespace."""
    namespace = env.get(VARIABLE)
    return f"{checked(namespace)}.{PRODUCT}" if namespace else PRODUCT
