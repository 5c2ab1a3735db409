"""Builds the images, runs docker-compose.yml to its first adapters, and restarts each container once in the middle.

The stack is started, asked and ended by the commands of docs/start/compose.md; those of docs/operations (blocks
```console compose) upgrade it and rotate its keys.

    make test-docker [ARGS='--targets core,model,trainer-cpu --keep']

promtool checks the configuration of Prometheus, the alerts and the queries of the dashboards. Prometheus, the collector
and the registry are started beside the stack (`profiles.py`).

Images are built on the stock bases where the engine can pull them, else on bases made here (`local_images.py`). The
last line on stdout is one JSON object; the exit code is 1 if it has problems. --write replaces the figures in
docs/results/docker.md. TORCH_CPU_INDEX is passed on to the builds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tentalis.local.jars import cache_dir
from tentalis.local.ports import free_port
from tests.docker import gui_episode, profiles, promtool, sandbox_episode
from tests.docker.engine import Docker, NotAvailable, engine, say, wait_for
from tests.docker.images import ALL_TARGETS, BuiltImages, build_images, tag_of
from tests.docker.profile_images import profile_images
from tests.docker.stack import PROJECT, Stack
from tests.support import ROOT, compose
from tests.support.transcript import PageMismatch, PageShell, ShownCommand, commands_of

NEXT = "next"
RUN, STEPS = "compose", 8
FIRST_STEPS = "start/compose.md"
WITHOUT_TORCH = ("core", "worker-gui")
FIRST_ADAPTER_S, DONE_S = 2400.0, 2400.0


@dataclass
class Report(BuiltImages):
    """The figures of a run; `problems` is empty if it went well."""

    engine: str = ""
    cuda: dict[str, str] = field(default_factory=dict)  # of the torch of each trainer
    up_s: float | None = None
    profiles: dict[str, int] = field(default_factory=dict)  # what the services of profiles were seen to have
    restarted: list[str] = field(default_factory=list)
    commands: dict[str, int] = field(default_factory=dict)  # followed, by page
    first_adapter_s: float | None = None
    served: str | None = None
    verify: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def trainer_config(folder: Path) -> Path:
    """Writes the run of the compose file, ended after a few smaller steps."""
    config = yaml.safe_load((ROOT / "deploy" / "compose" / "trainer.yaml").read_text(encoding="utf-8"))
    path = folder / "trainer.yaml"
    path.write_text(yaml.safe_dump(config | {"steps": STEPS, "batch_rollouts": 16}), encoding="utf-8")
    path.chmod(0o644)
    folder.chmod(0o755)
    return path


@dataclass
class Operator:
    """Follows the pages of docs in one shell, with the ports of this stack in the place of those that they name."""

    shell: PageShell
    ports: Mapping[str, str]
    report: Report

    def follow(self, page: str, name: str = "compose", commands: Sequence[ShownCommand] | None = None) -> None:
        """Follows the blocks of one name, or some commands of them. Raises PageMismatch."""
        given = commands_of(ROOT / "docs" / page, name) if commands is None else commands
        say(f"following {len(given)} commands of {page}")
        self.shell.follow([self._here(each) for each in given])
        self.report.commands[page] = self.report.commands.get(page, 0) + len(given)

    def _here(self, command: ShownCommand) -> ShownCommand:
        text = command.text
        for port, here in self.ports.items():
            text = text.replace(f"127.0.0.1:{port}/", f"127.0.0.1:{here}/")
        return replace(command, text=text)


@contextmanager
def cleared(stack: Stack, keep: bool) -> Iterator[None]:
    """Shows the logs after a failure; the stack and its volumes are gone afterwards, unless `keep`."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):
            print(stack("ps", "--all"), stack("logs", "--no-color", "--tail", "25"), sep="\n", file=sys.stderr)
        raise
    finally:
        if not keep:
            stack("--profile", "*", "down", "--volumes", "--timeout", "20", timeout=300)


def answers(stack: Stack) -> int:
    """Returns the number of answers on the log, or 0 while it cannot be read."""
    lines = stack.inside("tentalis", "consume", "tentalis.results.v1", "--exit", "-n", "8", "-o", "json", check=False)
    return sum('"type": "Result"' in line for line in lines.splitlines())


def served(stack: Stack) -> list[dict[str, Any]]:
    """Returns the trained versions that are served, newest first; none while the log cannot be read."""
    try:
        rows: list[dict[str, Any]] = json.loads(stack.inside("tentalis", "policy", "list", "-o", "json", check=False))
    except ValueError:
        return []
    return [row for row in rows if row["served_by"] and row["step"]]


def healthy(stack: Stack) -> list[str]:
    """Returns the services that neither run healthily nor ended well."""
    lines = stack("ps", "--all", "--format", "json").splitlines()
    found = [row for line in lines if line.startswith(("{", "[")) for row in _rows(line)]
    return [
        f"{row['Service']}: {row['State']} {row['Health']} {row['ExitCode']}"
        for row in found
        if not (row["Health"] == "healthy" or (row["State"] == "exited" and row["ExitCode"] == 0))
    ]


def _rows(line: str) -> list[dict[str, Any]]:
    value = json.loads(line)
    return value if isinstance(value, list) else [value]


def restart_each(stack: Stack, report: Report) -> None:
    """Restarts the container of each service once, one after another."""
    jobs = ("topics", "keys")
    services = [name for name in compose.active(compose.project()["services"]) if name not in jobs]
    for name in services:
        say(f"restarting {name}")
        stack("restart", "--timeout", "15", name, timeout=180)
        report.restarted.append(name)
        time.sleep(3)


def check_gateway(stack: Stack, port: int, report: Report) -> None:
    """Asks the policy through the gateway, with the key of the first start."""
    key = stack.inside("cat", "/var/lib/tentalis/api-key").strip()
    body = {"model": "assistant", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 16}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        if not json.load(response)["choices"][0]["message"]["content"]:
            report.problems.append("the gateway gave no answer")


def check_images(docker: Docker, report: Report) -> None:
    """Checks the user, the read-only root, the packages and the bill of materials of each image; plays an episode in
    `sandbox`."""
    for target in report.built_s:
        image = tag_of(target)
        plain = ("run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--entrypoint")
        script = "id -u; test ! -w / && test ! -w /opt/tentalis && echo closed"
        script += "".join(f"; python -c 'import {name}' && echo {name}" for name in ("tentalis", "torch"))
        script += "; git --version | cut -c 1-3"
        said = docker(*plain, "sh", image, "-c", f"({script}) 2>/dev/null; true", timeout=300).split()
        packages = [] if target == "sandbox" else ["tentalis", "git" if target in WITHOUT_TORCH else "torch"]
        wanted = ["10001", "closed", *packages]
        if said != wanted:
            report.problems.append(f"{target}: {said}, expected {wanted}")
        if target == "sandbox":
            report.problems += sandbox_episode.problems(docker, image)
            continue
        listed = json.loads(docker(*plain, "cat", image, "/usr/share/doc/tentalis/sbom.cdx.json"))["components"]
        if ("torch" in {each["name"] for each in listed}) == (target in WITHOUT_TORCH) or len(listed) < 50:
            report.problems.append(f"{target}: its bill of materials has {len(listed)} components")
        docker(*plain, "tentalis", image, "--version")
        if target == "worker-gui":
            report.problems += gui_episode.problems(docker, image)
        if target.startswith("trainer"):
            docker(*plain, "tentalis", image, "train", "--help")
            cuda = "import deepspeed, torch; print(torch.version.cuda)"
            report.cuda[target] = docker(*plain, "python", image, "-c", cuda, timeout=300).split()[-1]
            if target == "trainer-gpu" and report.cuda[target] == "None":
                report.problems.append(f"{target}: its torch is built without CUDA")
        # Raises without a wall for the actions of a model, and tries the wall with a command. The user has no
        # capability: in the bounding set it makes Docker's seccomp profile allow what sandlock needs.
        wall = "from tentalis.agents.sandbox.choose import choose_wall; print(choose_wall().name)"
        docker(plain[0], "--cap-add", "SYS_PTRACE", *plain[1:], "python", image, "-c", wall)


def loop(stack: Stack, operator: Operator, port: int, keep: bool, report: Report) -> None:
    """Runs the stack to its last step, with a restart of everything in the middle, and verifies its log."""
    began = time.monotonic()
    page = commands_of(ROOT / "docs" / FIRST_STEPS)
    learned = next(number for number, command in enumerate(page) if command.text.startswith("until"))
    end = next(number for number, command in enumerate(page) if command.text.startswith("docker compose down"))
    with cleared(stack, keep):
        operator.follow(FIRST_STEPS, commands=page[:1])
        report.up_s = round(time.monotonic() - began, 1)
        say(f"up after {report.up_s} s")
        operator.follow(FIRST_STEPS, commands=page[1:learned])
        wait_for("the first answers of the worker", FIRST_ADAPTER_S, lambda: answers(stack))
        report.profiles, found = profiles.tried(stack)
        report.problems += found
        restart_each(stack, report)
        report.served = wait_for("an adapter is served", FIRST_ADAPTER_S, lambda: served(stack))[0]["version"]
        report.first_adapter_s = round(time.monotonic() - began, 1)
        say(f"{report.served} is served after {report.first_adapter_s} s")
        operator.follow("operations/upgrade.md")
        operator.follow(FIRST_STEPS, commands=page[learned:end])
        operator.follow("operations/in-a-cluster.md")
        operator.follow("operations/install.md")
        last = f"@v{STEPS}"
        wait_for("the last step", DONE_S, lambda: any(str(row["version"]).endswith(last) for row in served(stack)))
        wait_for("trainer and manager end, all others are healthy", 300, lambda: not healthy(stack))
        check_gateway(stack, port, report)
        operator.follow("operations/rotate.md")
        verdict = json.loads(
            stack.inside("tentalis", "verify", RUN, "--wait", "300", "-o", "json", check=False, timeout=600)
        )
        report.verify = {name: value for name, value in verdict.items() if isinstance(value, int)}
        report.problems += [str(problem) for problem in verdict["problems"]]
        report.problems += healthy(stack)
        if not keep:
            operator.follow(FIRST_STEPS, commands=page[end:])


def write(report: Report) -> None:
    """Writes the page of results."""
    page = ROOT / "docs" / "results" / "docker.md"
    head = page.read_text(encoding="utf-8").partition("```json")[0]
    page.write_text(f"{head}```json\n{json.dumps(vars(report), indent=1)}\n```\n", encoding="utf-8")


def run(options: argparse.Namespace, report: Report) -> None:
    """Builds the images and runs the stack. Raises what the modules of this test raise."""
    scratch = options.scratch.absolute()
    report.problems += promtool.problems(promtool.built(cache_dir()))
    with engine(scratch) as docker, tempfile.TemporaryDirectory() as folder:
        report.engine = docker("version", "--format", "{{.Server.Version}}").strip()
        kafka = build_images(docker, scratch, tuple(options.targets.split(",")), report)
        for target in report.built_s:
            docker("tag", tag_of(target), tag_of(target).replace(":test", f":{NEXT}"))
        variables = {"TENTALIS_REGISTRY": "tentalis-test", "TENTALIS_VERSION": "test", "KAFKA_IMAGE": kafka}
        check_images(docker, report)
        if options.no_loop:
            return
        chosen: dict[str, int] = {}
        for name in ("TENTALIS_GATEWAY_PORT", "TENTALIS_BRIDGE_PORT", "KAFKA_PORT", *profiles.PORTS):
            chosen[name] = free_port(avoid=chosen.values())
        port, ports = chosen["TENTALIS_GATEWAY_PORT"], {name: str(each) for name, each in chosen.items()}
        files = {"TENTALIS_TRAINER_CONFIG": str(trainer_config(Path(folder)))}
        traces = {name: profiles.example(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT",)}
        stack = Stack(docker, {**variables, **files, **ports, **traces, **profile_images(docker, scratch)})
        environment = {"COMPOSE_PROJECT_NAME": PROJECT, "COMPOSE_FILE": str(ROOT / "docker-compose.yml"), "NEXT": NEXT}
        environment |= {**docker.env, **stack.variables}
        with PageShell(Path(folder) / "operator", environment, limit_s=FIRST_ADAPTER_S) as shell:
            loop(stack, Operator(shell, {"8200": str(port)}, report), port, options.keep, report)


def main() -> int:
    """Runs the test; returns its exit code."""
    parser = argparse.ArgumentParser(prog="make test-docker", description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(ALL_TARGETS), help="images to build, separated by commas")
    parser.add_argument("--no-loop", action="store_true", help="only build and check the images")
    parser.add_argument("--keep", action="store_true", help="leave the containers running, on an engine that stays")
    parser.add_argument("--write", action="store_true", help="write docs/results/docker.md")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".tentalis" / "docker", help="data of an own engine")
    options = parser.parse_args()
    report = Report()
    try:
        run(options, report)
    except (NotAvailable, PageMismatch, RuntimeError, TimeoutError, OSError, subprocess.SubprocessError) as error:
        report.problems.append(str(error))
    if options.write:
        write(report)
    print(json.dumps(vars(report)))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
