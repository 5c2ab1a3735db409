"""Runs tests as a user for whom the rights of files hold, also where the tests run as root."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

_PR_CAPBSET_DROP = 24
_OVERRIDES = (1, 2, 3)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER."""


def _give_up_overrides() -> None:
    """Takes the capabilities that pass over the rights of files from the program that this process becomes."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in _OVERRIDES:
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "a capability was not given up")


def output_under_rights(code: str, *arguments: str | Path) -> str:
    """Returns the output of Python code that runs in a process for which the rights of files hold."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_give_up_overrides if os.geteuid() == 0 else None,
    ).stdout
