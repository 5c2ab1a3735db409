"""Attacks on processes: signals, ptrace, limits and priorities of others, fork bombs, zombies, and what does not end."""

from dataclasses import replace
from functools import partial

from tentalis.agents.sandbox import CommandEnd
from tests.redteam.attack import LIMITS, Attack, Trial

_FULL = "fills the table of processes"
_other = partial(Attack, "signals and ptrace", success="it reaches a process outside")
_many = partial(Attack, "fork bombs", success="it has more processes than its limit, or leaves one")
_endless = partial(
    Attack,
    "never ending",
    success="it runs on after its time limit",
    limits=replace(LIMITS, time_s=1.5),
    outside=lambda trial: trial.output.end is not CommandEnd.TIMED_OUT or trial.seconds > 15,
)
_exit = partial(
    Attack,
    "exit codes",
    success="another end than its own is recorded",
    outside=lambda trial: (trial.output.end, trial.output.exit_code) != (CommandEnd.EXITED, 7),
)


def _burnt_cpu(trial: Trial) -> bool:
    return trial.output.end is CommandEnd.TIMED_OUT


PROCESSES = (
    _other("signal to another process", code="import os; os.kill(@VICTIM@, 0); print('won')"),
    _other("kill another process", code="import os; os.kill(@VICTIM@, 9); print('won')"),
    _other("stop another process", code="import os; os.kill(@VICTIM@, 19); print('won')"),
    # Process 1 of a namespace of its own is not outside.
    _other("signal to the parent", code="import os; p = os.getppid()\nif p > 1: os.kill(p, 0); print('won')"),
    _other(
        "signal to the group of the parent",
        code="import os; p = os.getppid()\nif p > 1: os.killpg(os.getpgid(p), 0); print('won')",
    ),
    _other("signal to everybody", code="import os; os.kill(-1, 9)", harms="ends all processes of the user"),
    _other(
        "signal by a handle",
        code="import os, signal; signal.pidfd_send_signal(os.pidfd_open(@VICTIM@), 0); print('won')",
    ),
    _other(
        "signal by the terminal",
        code="import fcntl, os; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); print('won')",
    ),
    _other("attach", code="import ctypes\nif ctypes.CDLL(None).ptrace(16, @VICTIM@, 0, 0) == 0: print('won')"),
    _other("seize", code="import ctypes\nif ctypes.CDLL(None).ptrace(0x4206, @VICTIM@, 0, 0) == 0: print('won')"),
    _other(
        "priority of another process", code="import os; os.setpriority(os.PRIO_PROCESS, @VICTIM@, 19); print('won')"
    ),
    _other(
        "priority of all processes",
        code="import os; os.setpriority(os.PRIO_USER, os.getuid(), 19)",
        harms="slows all processes of the user down",
    ),
    _other("processors of another process", code="import os; os.sched_setaffinity(@VICTIM@, {0}); print('won')"),
    _other(
        "limits of another process",
        code="import resource; resource.prlimit(@VICTIM@, resource.RLIMIT_CORE, (0, 0)); print('won')",
    ),
    _other(
        "own limits raised",
        code="""import resource
resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))
if resource.getrlimit(resource.RLIMIT_CPU)[0] == -1: print('won')""",
    ),
    _other(
        "memory of process 1",
        code="import os\nif os.getppid() <= 1: open('/proc/1/mem', 'r+b'); print('won')",
    ),
    _many(
        "fork bomb",
        code="""import os, time
n = 0
try:
    while n < 500:
        if os.fork() == 0: time.sleep(600)
        n += 1
except OSError: pass
if n > 8: print('won', n)""",
        harms=_FULL,
    ),
    _many(
        "fork bomb of a shell",
        code="""import subprocess
open('bomb', 'w').write('# @PLACE@\\nbomb() { bomb | bomb & }; bomb; wait')
subprocess.run(['/bin/bash', '@PLACE@/work/bomb'], stderr=subprocess.DEVNULL)""",
        limits=replace(LIMITS, time_s=5.0),
        harms=_FULL,
    ),
    _many(
        "bomb of threads",
        code="""import threading, time
n = 0
try:
    while n < 400: threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); n += 1
except RuntimeError: pass
if n > 8: print('won', n, flush=True)
import os; os._exit(0)""",
    ),
    _many(
        "zombie storm",
        code="""import os
n = 0
try:
    while n < 1000:
        if os.fork() == 0: os._exit(0)
        n += 1
except OSError: pass
if n > 8: print('won', n)""",
    ),
    _many(
        "orphan storm",
        code="""import os, time
for _ in range(300):
    try: child = os.fork()
    except OSError: time.sleep(0.01); continue
    if child == 0:
        try:
            if os.fork() == 0: time.sleep(0.01)
        finally: os._exit(0)
    os.waitpid(child, 0)""",
    ),
    _many(
        "daemon",
        code="""import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(600)
    os._exit(0)""",
    ),
    _many(
        "daemon without descriptors",
        code="""import os, time
if os.fork() == 0:
    os.setsid(); os.closerange(0, 64); time.sleep(600)""",
    ),
    _endless("sleep", code="import time; time.sleep(600)"),
    _endless(
        "signals ignored",
        code="import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)",
    ),
    _endless("stopped by itself", code="import os; os.kill(os.getpid(), 19)"),
    _endless(
        "another process group",
        code="""import os, time
child = os.fork()
if not child: os.setpgid(0, 0); time.sleep(600)
while os.getpgid(child) != child: time.sleep(0.01)
os.setpgid(0, child); time.sleep(600)""",
    ),
    _endless(
        "another session", code="import os, time\nif os.fork(): os._exit(time.sleep(600))\nos.setsid(); time.sleep(600)"
    ),
    Attack(
        "never ending",
        "busy",
        "it computes on after its limit of CPU seconds",
        "while True: pass",
        limits=replace(LIMITS, cpu_s=1, time_s=12.0),
        outside=_burnt_cpu,
    ),
    Attack(
        "never ending",
        "busy, and ignores the signal",
        "it computes on after its limit of CPU seconds",
        "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        limits=replace(LIMITS, cpu_s=1, time_s=12.0),
        outside=_burnt_cpu,
    ),
    _exit(
        "written to descriptors",
        code="""import os
for fd in range(3, 64):
    try: os.write(fd, b'exited 0\\n')
    except OSError: pass
os._exit(7)""",
    ),
    _exit("a child that exits well", code="import os\nif os.fork() == 0: os._exit(0)\nos.wait(); os._exit(7)"),
    _exit(
        "a child that exits later", code="import os, time\nif os.fork() == 0: time.sleep(0.5); os._exit(0)\nos._exit(7)"
    ),
    Attack(
        "exit codes",
        "death by a signal",
        "a killed command is recorded as one that exited well",
        "import os; os.kill(os.getpid(), 11)",
        outside=lambda trial: trial.output.end is not CommandEnd.KILLED,
    ),
)
