"""The TENTALIS_* variables that there are: a misspelt one must not pass for one that is not set."""

import difflib
import re
from collections.abc import Mapping

PREFIX = "TENTALIS_"
VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("BOOTSTRAP", "CACHE", "DATA", "DEBUG", "HOME", "LOG", "TRACES", "REPLICATION_FACTOR"),
        *("SECURITY_PROTOCOL", "SASL_MECHANISM", "SASL_USERNAME", "SASL_PASSWORD", "SASL_PASSWORD_FILE"),
        *("SSL_CA", "SSL_CERTIFICATE", "SSL_KEY", "SSL_KEY_PASSWORD", "SSL_KEY_PASSWORD_FILE", "SSL_VERIFY_HOSTNAME"),
        *("SERVER", "KEYS", "HINTERS", "SCORERS", "SIGNALS", "SESSION_IDLE", "METRICS_HOST", "METRICS_PORT"),
        *("STATE", "STATE_DIR", "MARKER_TTL", "MAX_OPEN_TASKS", "MAX_OPEN_BYTES", "MAX_OPEN_SESSIONS"),
        *("DEAD_RUN", "DEAD_RATIO", "HEARTBEAT", "READY_FD", "SUPERVISED"),
        *("URL", "API_KEY"),  # of agents beside a gateway
    )
)
_NEAR = 0.68
# What Kubernetes tells a pod of a service whose name begins like ours.
_LINK_NAME, _LINK_VALUE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_"), re.compile(r"(tcp|udp|sctp)://")


def misspelt(env: Mapping[str, str]) -> list[str]:
    """What is set under nearly the name of a variable of ours, in words for a person. Other names may be somebody
    else's, such as that of a key that a file of settings names."""
    names = sorted(name.removeprefix(PREFIX) for name in VARIABLES)
    found = []
    for name, value in env.items():
        if not name.startswith(PREFIX) or name in VARIABLES or _LINK_NAME.search(name) or _LINK_VALUE.match(value):
            continue
        near = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=_NEAR)
        found += [f"{name} is set and means nothing here: did you mean {PREFIX}{each}?" for each in near]
    return found
