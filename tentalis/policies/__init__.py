"""From a published adapter to a served one: promotion, checked loading, acknowledgement."""

from tentalis.policies.process import serve

__all__ = ["serve"]
