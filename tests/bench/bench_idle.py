"""What a local stack costs while nothing happens: CPU and memory of each process of `tentalis up`.

Starts the stack in a folder of its own (BENCH_MODEL, SmolLM2-135M; BENCH_GATEWAY=1 with a gateway), waits
BENCH_SETTLE (60) seconds once it is ready, and counts for BENCH_SECONDS (120). `cpu`: share of one core, `mb`: memory
in which a page that several processes share counts once (PSS). `beside_model_mb`: of all but the model server, the
trainer's copy of the model included; `services_mb`: without the trainer too.
"""

import json
import os
import tempfile
import time
from pathlib import Path

from tentalis.inference.models import resolve_model
from tentalis.service.settings import Settings
from tests.bench.lab import cpu_seconds, log, report
from tests.bench.process_tree import descendants, pss_mb
from tests.e2e.lab import Home


def used_by(pids: list[int]) -> float:
    """CPU seconds of processes so far."""
    return sum(cpu_seconds(pid) for pid in pids)


def main() -> None:
    """Runs the benchmark."""
    settle, seconds = float(os.environ.get("BENCH_SETTLE", "60")), float(os.environ.get("BENCH_SECONDS", "120"))
    model = resolve_model(os.environ.get("BENCH_MODEL"), Settings.from_env().cache)
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home", model)
        gateway = ["--gateway"] if os.environ.get("BENCH_GATEWAY") == "1" else []
        began = time.monotonic()
        started = home.run("up", "--detach", "--policy-model", str(model), *gateway, timeout=900)
        if started.returncode != 0:
            raise SystemExit(f"the stack did not start: {started.stderr}\n{home.tail()}")
        start_s = time.monotonic() - began
        try:
            time.sleep(settle)
            found = {name: each["pid"] for name, each in home.processes().items() if each.get("pid")}
            supervisor = {"supervisor": int(json.loads((home.path / "lock").read_text())["pid"])}
            trees = {name: [pid, *descendants(pid)] for name, pid in found.items()} | {
                name: [pid] for name, pid in supervisor.items()
            }
            before, clock = {name: used_by(pids) for name, pids in trees.items()}, time.monotonic()
            time.sleep(seconds)
            elapsed = time.monotonic() - clock
            cpu = {name: (used_by(pids) - before[name]) / elapsed for name, pids in trees.items()}
            memory = {name: sum(map(pss_mb, pids)) for name, pids in trees.items()}
        finally:
            home.run("down")
    for name in trees:
        log(f"{name}: {cpu[name]:.1%} of a core, {memory[name]:.0f} MB")
    report(
        cpu=sum(cpu.values()),
        beside_model_mb=round(sum(mb for name, mb in memory.items() if name != "model")),
        services_mb=round(sum(mb for name, mb in memory.items() if name not in ("model", "trainer"))),
        start_s=start_s,
        processes={name: {"cpu": round(cpu[name], 4), "mb": round(memory[name])} for name in trees},
    )


if __name__ == "__main__":
    main()
