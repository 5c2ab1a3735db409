"""A machine whose libraries print to stdout when they are imported, in every way in which a library can.

Python imports this module at its start if this folder is in PYTHONPATH. Each line holds the word `noise`.
"""

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType

NOISY = ("torch", "duckdb", "safetensors")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in NOISY:
            sys.meta_path.remove(self)
            _print(name)
        return None


def _print(name: str) -> None:
    import atexit
    import ctypes
    import subprocess

    print(f"noise: printed by {name}")
    logger = logging.getLogger(f"noise.{name}")
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.warning("noise: logged by %s", name)
    atexit.register(logger.warning, "noise: logged at the end")
    os.write(1, b"noise: written to the descriptor\n")
    ctypes.CDLL(None).puts(b"noise: held by the C library until the end")
    subprocess.run(["echo", "noise: printed by a child process"], check=False)


sys.meta_path.insert(0, _Finder())
