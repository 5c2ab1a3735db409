"""The independent verifier: is a run, as its topics tell it, complete and right?

It reads the topics and nothing else, and shares no code with the stream applications or the trainer, only `schemas/`,
which is the contract: what they get wrong, it does not get wrong with them. `check` is pure; `verify` reads first.
"""

from tentalis.verify.check import check
from tentalis.verify.model import Log, Problem, Report, Seen
from tentalis.verify.reader import verify

__all__ = ["Log", "Problem", "Report", "Seen", "check", "verify"]
