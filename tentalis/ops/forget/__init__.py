"""Erases a user or a session. In: a request. Out: redacted rollouts, no live state, and a report of the rest.

Begin reading with `forget` in `process`; `core` has the pure rules.
"""

from tentalis.ops.forget.core import NoSuchRequest, request_of
from tentalis.ops.forget.process import ForgetReport, forget

__all__ = ["ForgetReport", "NoSuchRequest", "forget", "request_of"]
