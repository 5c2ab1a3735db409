"""An episode of the environment gui in the image `worker-gui`: its browser behind the wall, without a network."""

from __future__ import annotations

import json
import shlex

from tentalis.agents.environments.gui_chromium import chromium_files
from tentalis.local.jars import cache_dir
from tests.docker.engine import Docker

CLICK = f"<tool_call>\n{json.dumps({'name': 'click', 'arguments': {'ref': 1}})}\n</tool_call>\n\n"
TRY = "tentalis env try gui miniwob/click-test"


def problems(docker: Docker, image: str) -> list[str]:
    """Plays a page by hand, with the browser of this machine's cache; returns what went wrong."""
    folder = chromium_files(cache_dir()).folder
    mount = f"{folder}:/var/lib/tentalis/cache/{folder.name}:ro"
    options = ("--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-add", "SYS_PTRACE")
    script = f"printf %s {shlex.quote(CLICK)} | {TRY}"
    said = docker("run", *options, "--volume", mount, "--entrypoint", "sh", image, "-c", script, timeout=300)
    last = said.strip().splitlines()[-1]
    return [] if last.startswith("[score]") and last.endswith(" reward 1") else [f"{TRY} in {image}: {last}"]
