"""Runs one attack against one wall."""

import tempfile
import time
from pathlib import Path

import pytest

from tentalis.agents.environments.folders import remove_folder
from tentalis.agents.environments.toolcall import PYTHON
from tentalis.agents.sandbox import Wall
from tests.redteam.attack import Attack, Trial
from tests.redteam.place import SECRET, made_place

BEGUN = b"begun\n"


def successes(attack: Attack, wall: Wall) -> list[str]:
    """Runs an attack. Returns what it achieved; empty: the wall held. Raises RuntimeError if the attack did not run."""
    folder = Path(tempfile.mkdtemp(prefix="tentalis-redteam-"))
    try:
        with pytest.MonkeyPatch.context() as patch, made_place(folder) as place:
            patch.setenv("TENTALIS_TEST_SECRET", SECRET)
            script = folder / "main.py"
            script.write_text(f"print('begun', flush=True)\n{place.filled(attack.code)}\n")
            began = time.monotonic()
            command = [PYTHON, "-I", str(script)]
            output = wall.run(command, place.work, attack.limits, readable=(script,))
            trial = Trial(wall, place, output, time.monotonic() - began)
            if not output.stdout.startswith(BEGUN) or b"SyntaxError" in output.stderr or b"NameError" in output.stderr:
                raise RuntimeError(f"the attack {attack.id} did not run: {output}")
            found = place.damage()
            if b"won" in output.stdout:
                found.append("it won: " + output.stdout[len(BEGUN) :][:200].decode(errors="replace").strip())
            if SECRET.encode() in output.stdout + output.stderr:
                found.append("the secret was read")
            if attack.outside(trial):
                found.append(attack.success)
            return found
    finally:
        remove_folder(folder)
