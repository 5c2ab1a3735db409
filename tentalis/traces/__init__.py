"""Traces of programs that only log their calls: recorded on disk first, sent to a gateway when one is reachable.

In: prompts, responses and feedback. Out: POST /v1/traces. Begin with client.py.
Imports only the standard library (docs/how-to/record-traces.md).

    client = TraceClient("http://127.0.0.1:8200", "tk-...", "spool")
    trace_id = client.record("summarise", "gpt-x", prompt, response)
    client.submit_language_feedback(trace_id, "Too long.", -1)
    client.flush(10)
"""

from tentalis.traces.client import TraceClient, TraceClientStats
from tentalis.traces.judge import Judgement, judge
from tentalis.traces.spool import SpoolBusy, SpoolDamaged, SpoolError, TraceSpoolFull

__all__ = [
    "Judgement",
    "SpoolBusy",
    "SpoolDamaged",
    "SpoolError",
    "TraceClient",
    "TraceClientStats",
    "TraceSpoolFull",
    "judge",
]
