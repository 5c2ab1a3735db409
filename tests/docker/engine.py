"""The Docker engine of the test: the one that answers, or one of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")
_BRIDGE = Path("/sys/class/net/docker0")


class NotAvailable(RuntimeError):
    """Something that the test needs is missing; the message says what to install."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def wait_for(what: str, seconds: float, check: Callable[[], Found], every: float = 3.0) -> Found:
    """Returns the first true result of `check`. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(every)
    return found


@dataclass
class Docker:
    """Commands to one engine. `env`: added to the environment of each."""

    env: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, timeout: float = 120.0, check: bool = True, **more: str) -> str:
        """Returns the output of `docker ARGUMENTS`. `more`: variables. Raises RuntimeError, with the output's end."""
        done = subprocess.run(
            ["docker", *arguments],
            env=os.environ | self.env | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"docker {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout

    def succeeds(self, *arguments: str, timeout: float = 120.0) -> bool:
        """Returns True if `docker ARGUMENTS` ends with exit code 0 within `timeout` seconds."""
        try:
            done = subprocess.run(
                ["docker", *arguments], env=os.environ | self.env, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


@contextmanager
def engine(folder: Path, *, with_compose: bool = True) -> Iterator[Docker]:
    """Yields the engine that answers; without one, starts `dockerd` with its data in `folder`, which needs root, and
    takes back what that changes of the machine's network.

    Raises NotAvailable.
    """
    if shutil.which("docker") is None:
        raise NotAvailable("no docker command: install Docker (on Debian: apt-get install docker.io)")
    docker = Docker()
    if docker.succeeds("info"):
        if with_compose:
            require_compose(docker)
        yield docker
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise NotAvailable(
            "no Docker engine answers. Start one, name it with DOCKER_HOST, or run as root with dockerd installed "
            "(on Debian: apt-get install docker.io): then the test starts its own"
        )
    docker = Docker({"DOCKER_HOST": f"unix://{folder}/docker.sock"})
    if with_compose and not docker.succeeds("compose", "version"):
        docker.env["DOCKER_CONFIG"] = str(_compose_plugin())
        require_compose(docker)
    with _own(folder), (folder / "dockerd.log").open("ab") as log:
        command = _dockerd(folder)
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while not docker.succeeds("info"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NotAvailable(f"dockerd does not start: see {folder}/dockerd.log")
                time.sleep(0.5)
            say(f"started an engine with its data in {folder}")
            yield docker
        finally:
            process.terminate()
            process.wait(60)


def require_compose(docker: Docker) -> None:
    """Raises NotAvailable without Compose 2."""
    if not docker.succeeds("compose", "version"):
        raise NotAvailable(
            "no `docker compose`: install Docker Compose 2.20 or newer (the package docker-compose-plugin)"
        )


def _compose_plugin() -> Path:
    from tentalis.local.jars import cache_dir
    from tests.docker import compose_plugin

    return compose_plugin.built(cache_dir())


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    """Makes the folder of an engine; afterwards its socket is gone, packets are forwarded as they were before, and its
    bridge is removed if it was not there before."""
    folder.mkdir(parents=True, exist_ok=True)
    policy, bridge = _forward_policy(), _BRIDGE.exists()
    try:
        yield
    finally:
        (folder / "docker.sock").unlink(missing_ok=True)
        if policy and _forward_policy() != policy:
            subprocess.run(["iptables", "-P", "FORWARD", policy], check=True)
        if _BRIDGE.exists() and not bridge:
            subprocess.run(["ip", "link", "delete", _BRIDGE.name], check=True)


def _forward_policy() -> str:
    """Returns the policy of the chain FORWARD, which dockerd sets to DROP; "" without iptables."""
    if shutil.which("iptables") is None:
        return ""
    rules = subprocess.run(["iptables", "-S", "FORWARD"], capture_output=True, text=True, check=True).stdout
    return rules.split()[2]


def _dockerd(folder: Path) -> Sequence[str]:
    return (
        "dockerd",
        *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
        *("--pidfile", str(folder / "docker.pid"), "--host", f"unix://{folder}/docker.sock"),
    )


def pullable(docker: Docker, image: str) -> bool:
    """Returns True if the engine has an image or can pull it."""
    return docker.succeeds("image", "inspect", image) or docker.succeeds("pull", "--quiet", image, timeout=600)


def build(docker: Docker, context: Path, tag: str, *, target: str = "", args: Mapping[str, str] | None = None) -> float:
    """Builds an image; returns the seconds it took."""
    started = time.monotonic()
    given = [word for name, value in (args or {}).items() for word in ("--build-arg", f"{name}={value}")]
    wanted = ["--target", target] if target else []
    docker("build", "--network", "host", "--tag", tag, *wanted, *given, str(context), timeout=3600)
    return time.monotonic() - started
