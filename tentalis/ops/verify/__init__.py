"""The independent verifier. In: the topics of a run. Out: a `VerifyReport` of missing, wrong and duplicate records.

It shares no code with the stream applications or the trainer, so that it does not repeat their errors; `schemas/` is
the contract of all. Begin reading with `check` (pure); `reader` reads the topics.
"""

from tentalis.ops.verify.check import check
from tentalis.ops.verify.model import Log, LoggedRecord, VerifyProblem, VerifyReport
from tentalis.ops.verify.reader import verify

__all__ = ["Log", "LoggedRecord", "VerifyProblem", "VerifyReport", "check", "verify"]
