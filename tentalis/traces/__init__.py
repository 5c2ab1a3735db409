"""Traces for programs that only want to log: recorded on disk at once, brought to a gateway when one is there.

Nothing but the standard library is imported (docs/traces.md).

    client = TraceClient("http://127.0.0.1:8200", "tk-...", "spool")
    trace_id = client.record("summarise", "gpt-x", prompt, response)
    client.submit_language_feedback(trace_id, "Too long.", -1)
    client.flush(10)
"""

from tentalis.traces.client import Stats, TraceClient
from tentalis.traces.judge import Judgement, judge
from tentalis.traces.spool import SpoolBusy, SpoolDamaged, SpoolError, SpoolFull

__all__ = ["Judgement", "SpoolBusy", "SpoolDamaged", "SpoolError", "SpoolFull", "Stats", "TraceClient", "judge"]
