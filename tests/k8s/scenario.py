"""The life of a release: install, test, network, upgrade, rollback, kills, scales, evictions, drains, end of load,
uninstall."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tentalis.kafka import topology
from tentalis.kafka.topology import InStack
from tests.docker.engine import say, wait_for
from tests.docker.images import BuiltImages
from tests.k8s import network
from tests.k8s.cluster import Cluster
from tests.support import ROOT
from tests.support.transcript import PageShell, ShownCommand, commands_of

CHART = ROOT / "helm" / "tentalis"
RELEASE, NAMESPACE = "tentalis", "tentalis-test"
STREAMS = tuple(each.name for each in topology.streams() if each.in_stack in (InStack.ALWAYS, InStack.WITH_GATEWAY))
FIRST_STEPS = "start/helm.md"
WAIT_S, TEST_S = 1200.0, 1800
SETTLED_S = 960  # the deadline of a task of the simulated users, and a minute
ASK = """
import json, sys, urllib.request
body = {"model": "assistant", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 16}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[1]}
request = urllib.request.Request("http://127.0.0.1:8200/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["message"]["content"])
"""
Values = dict[str, Any]


@dataclass
class ReleaseReport(BuiltImages):
    """The figures of a run of either scenario; `problems` is empty if it went well."""

    cluster: str = ""
    installed_s: float | None = None
    first_adapter_s: float | None = None
    served: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tested: str = ""
    killed: list[str] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    commands: dict[str, int] = field(default_factory=dict)  # followed, by page
    verify: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Returns the last line of the test."""
        counts = {name: self.verify.get(name) for name in ("lost", "wrong", "duplicates")}
        return {"installed_s": self.installed_s, "first_adapter_s": self.first_adapter_s, **counts}


@dataclass
class Report(ReleaseReport):
    """The figures of the long scenario, too."""

    connections: int = 0  # tried against the network policies
    evicted: list[str] = field(default_factory=list)
    refused_evictions: int = 0
    drained: dict[str, list[str]] = field(default_factory=dict)  # evicted pods, by node


@dataclass
class Release:
    """The release under test: `changes` are values beside those of the trial."""

    cluster: Cluster
    scratch: Path
    changes: Values
    report: ReleaseReport
    operator: PageShell
    settle_s: int = SETTLED_S

    def helm(self, *arguments: str, timeout: float = WAIT_S + 60) -> str:
        return self.cluster.helm(*arguments, "--namespace", NAMESPACE, timeout=timeout)

    def values(self) -> list[str]:
        """Writes the values; returns the options that name them."""
        path = self.scratch / "values.yaml"
        path.write_text(yaml.safe_dump(self.changes), encoding="utf-8")
        return ["--set", "kafka.embedded.enabled=true", "--values", str(path)]

    def follow(self, page: str, name: str = "", commands: Sequence[ShownCommand] | None = None) -> None:
        """Follows the blocks of one name of a page, or some of their commands. Raises PageMismatch."""
        given = commands_of(ROOT / "docs" / page, name) if commands is None else commands
        self.operator.follow(given)
        self.report.commands[page] = self.report.commands.get(page, 0) + len(given)

    def upgrade(self, what: str) -> None:
        """Runs `helm upgrade` with the present values and waits until everything is ready."""
        with self.step(what):
            self.helm("upgrade", RELEASE, str(CHART), *self.values(), "--wait", "--timeout", f"{WAIT_S:.0f}s")

    def step(self, what: str) -> _Step:
        return _Step(what, self.report)

    def inside(self, *command: str, timeout: float = 300.0) -> str:
        """Returns the output of a command in the gateway's pod; "" if it fails."""
        return self.cluster.kubectl(
            "exec", "-n", NAMESPACE, f"deploy/{RELEASE}-gateway", "-c", "gateway", "--", *command,
            timeout=timeout, check=False,
        )  # fmt: skip

    def kill(self, pod: str) -> None:
        """Deletes a pod by force, without grace."""
        self.cluster.kubectl("delete", "pod", "-n", NAMESPACE, pod, "--grace-period=0", "--force")
        self.report.killed.append(pod)

    def api_key(self) -> str:
        """Returns the API key that the chart made."""
        path = ("-o", "jsonpath={.data.api-key}")
        return base64.b64decode(
            self.cluster.kubectl("get", "secret", f"{RELEASE}-keys", "-n", NAMESPACE, *path)
        ).decode()

    def ask_gateway(self, key: str) -> None:
        """Asks the policy with a key of the gateway. Raises RuntimeError if it gives no answer."""
        if not self.inside("python", "-c", ASK, key):
            raise RuntimeError("the gateway gave no answer to the key of the release")

    def test_log(self) -> str:
        """Returns what the pod of `helm test` says of the adapter that learned from its tasks."""
        said = self.cluster.kubectl("logs", "-n", NAMESPACE, f"{RELEASE}-test")
        return next(line for line in said.splitlines() if line.startswith("learned: "))

    def pods(self) -> list[dict[str, Any]]:
        """Returns the pods of processes that stay: no Jobs, no tests."""
        found = self.cluster.get("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/instance={RELEASE}")
        owners = ("StatefulSet", "ReplicaSet")
        return [pod for pod in found if pod["metadata"].get("ownerReferences", [{}])[0].get("kind") in owners]

    def ready(self) -> bool:
        """True if every workload has the pods that it should have, and all are ready."""
        for each in self.cluster.get("deployments,statefulsets", "-n", NAMESPACE):
            status, wanted = each["status"], each["spec"]["replicas"]
            if status.get("observedGeneration") != each["metadata"]["generation"]:
                return False
            if (status.get("readyReplicas", 0), status.get("replicas", 0)) != (wanted, wanted):
                return False
        return True

    def wait_ready(self, what: str) -> None:
        wait_for(f"everything is ready after {what}", WAIT_S, self.ready)

    def served(self) -> str:
        """Returns the newest trained version that is served, "" for none."""
        with suppress(ValueError):
            rows = json.loads(self.inside("tentalis", "policy", "list", "-o", "json"))
            return next((str(row["version"]) for row in rows if row["served_by"] and row["step"]), "")
        return ""

    def wait_learned(self, what: str) -> None:
        """Waits until a newer version is served than the last that was noted: the loop still turns."""
        before = list(self.report.served.values())[-1]

        def newer() -> str:
            version = self.served()
            return "" if version == before else version

        found = wait_for(f"a new adapter after {what}", WAIT_S, newer, every=10.0)
        self.report.served[what] = found
        say(f"{found} is served")


@dataclass
class _Step:
    """A step of the scenario: says that it begins, and notes how long it took."""

    what: str
    report: ReleaseReport
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.monotonic()
        say(self.what)

    def __exit__(self, *_: object) -> None:
        self.report.seconds[self.what] = round(time.monotonic() - self.began, 1)


def life(release: Release, report: Report) -> None:
    """Runs the whole scenario. `report`: that of the release."""
    install(release)
    if release.cluster.enforces:
        try_connections(release, report)
    key = release.api_key()
    release.ask_gateway(key)
    release.changes["image"]["tag"] = "next"
    release.upgrade("upgrade to other images")
    release.ask_gateway(key)
    release.wait_learned("upgrade")
    with release.step("rollback"):
        release.helm("rollback", RELEASE, "1", "--wait", "--timeout", f"{WAIT_S:.0f}s")
    release.changes["image"]["tag"] = "test"
    release.wait_learned("rollback")
    kill_each_role(release)
    release.wait_learned("kills")
    for number in (3, 2):
        scale(release, number)
    release.wait_learned("scaling")
    evict_all(release, report)
    release.wait_learned("evictions")
    if release.cluster.drain and len(release.cluster.get("nodes")) > 1:
        drain_each(release, report)
        release.wait_learned("drains")
    release.follow("operations/in-a-cluster.md", "kubernetes")
    stop_load(release)
    verify(release)
    uninstall(release)


@contextmanager
def operator_of(cluster: Cluster, scratch: Path, changes: Values) -> Iterator[PageShell]:
    """The shell of a newcomer in a checkout, with the values of the test, whose kubectl and helm use its namespace."""
    cluster.kubectl("create", "namespace", NAMESPACE)
    kubeconfig = scratch / "operator.kubeconfig"
    shutil.copy(cluster.kubeconfig, kubeconfig)
    here = ("config", "set-context", "--current", "--namespace", NAMESPACE, "--kubeconfig", str(kubeconfig))
    cluster.kubectl(*here)
    with (
        tempfile.TemporaryDirectory() as folder,
        PageShell(Path(folder), {"KUBECONFIG": str(kubeconfig)}, limit_s=TEST_S + 120) as shell,
    ):
        (Path(folder) / "bin" / "kubectl").symlink_to(cluster.kubectl_path)
        (shell.folder / "helm").symlink_to(ROOT / "helm")
        (shell.folder / "my-images.yaml").write_text(yaml.safe_dump(changes), encoding="utf-8")
        yield shell


def install(release: Release) -> None:
    """Follows the page of the first steps to its end but one, and watches for the first adapter."""
    report, began = release.report, time.monotonic()
    page = commands_of(ROOT / "docs" / FIRST_STEPS)
    test = next(number for number, command in enumerate(page) if command.text.startswith("helm test"))
    with release.step("install"):
        release.follow(FIRST_STEPS, commands=page[:1])
    report.installed_s = round(time.monotonic() - began, 1)
    release.follow(FIRST_STEPS, commands=page[1:test])
    with release.step("helm test"), ThreadPoolExecutor(1) as pool:
        testing = pool.submit(release.follow, FIRST_STEPS, commands=page[test:-1])

        def first() -> str:
            if testing.done():
                testing.result()
            return release.served()

        report.served["install"] = wait_for("a first adapter", TEST_S, first)
        report.first_adapter_s = round(time.monotonic() - began, 1)
        testing.result()
    report.tested = release.test_log()
    say(report.tested)


def try_connections(release: Release, report: Report) -> None:
    """Tries what the network policies allow and forbid."""
    with release.step("connections tried"):
        tried, wrong = network.wrong(release.cluster, NAMESPACE, release.pods())
    report.connections = tried
    report.problems += wrong
    say(f"{tried} connections tried, {len(wrong)} wrong")


def kill_each_role(release: Release) -> None:
    """Kills one pod of each role, without grace, one role after the other."""
    with release.step("one pod of each role killed"):
        seen = set()
        for pod in release.pods():
            role, name = pod["metadata"]["labels"]["app.kubernetes.io/component"], pod["metadata"]["name"]
            if role in seen:
                continue
            seen.add(role)
            say(f"killing {name}")
            release.kill(name)
            time.sleep(3)
        release.wait_ready("the kills")


def scale(release: Release, replicas: int) -> None:
    """Gives every stream application this many processes."""
    for role in STREAMS:
        release.changes.setdefault("roles", {}).setdefault(role, {})["replicas"] = replicas
    release.upgrade(f"streams scaled to {replicas}")


def evict(release: Release, name: str) -> bool:
    """Asks for the eviction of a pod, as a drain does; False if a PodDisruptionBudget refuses it."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": NAMESPACE},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    try:
        release.cluster.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))
    except RuntimeError as error:
        if "disruption budget" not in str(error):
            raise
        return False
    return True


def evict_all(release: Release, report: Report) -> None:
    """Evicts every pod through the API of a drain; a pod that its budget protects is tried again until it may go."""
    with release.step("every pod evicted"):
        for pod in release.pods():
            name = pod["metadata"]["name"]
            if not evict(release, name):
                report.refused_evictions += 1
                say(f"{name} is protected by its disruption budget")
                wait_for(f"{name} may be evicted", WAIT_S, lambda name=name: evict(release, name))  # type: ignore[misc]
            report.evicted.append(name)
        release.wait_ready("the evictions")
    if not report.refused_evictions:
        report.problems.append("no disruption budget refused to evict the second of two pods")


def drain_each(release: Release, report: Report) -> None:
    """Drains each node, that of Kafka first; its pods start on the others. Then pods may run on it again."""
    names = sorted(node["metadata"]["name"] for node in release.cluster.get("nodes"))
    first = next(pod["spec"]["nodeName"] for pod in release.pods() if pod["metadata"]["name"].endswith("-kafka-0"))
    for name in sorted(names, key=lambda each: each != first):
        with release.step(f"{name} drained"):
            limits = ("--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={WAIT_S:.0f}s")
            said = release.cluster.kubectl("drain", name, *limits, timeout=WAIT_S + 60)
            release.wait_ready(f"the drain of {name}")
            left = [pod["metadata"]["name"] for pod in release.pods() if pod["spec"].get("nodeName") == name]
            if left:
                report.problems.append(f"{name} was drained and still runs {', '.join(left)}")
            release.cluster.kubectl("uncordon", name)
        report.drained[name] = sorted(re.findall(r"^pod/(\S+) evicted$", said, re.MULTILINE))


def stop_load(release: Release) -> None:
    """Removes the simulated users, so that the log comes to rest."""
    release.changes["roles"]["manager"] = {"enabled": False}
    release.upgrade("end of the load")


def verify(release: Release) -> None:
    """Verifies the run, once its open tasks have closed: the users who would answer are gone, so that they wait for
    their deadline. In less than that time the tasks that are still open are counted, but are no problem."""
    report, seconds = release.report, release.settle_s
    settled = () if seconds >= SETTLED_S else ("--allow-open",)
    with release.step("verify"):
        said = release.inside(
            "tentalis", "verify", RELEASE, "--wait", str(seconds), *settled, "-o", "json", timeout=seconds + 300
        )
    verdict = json.loads(said)
    report.verify = {name: value for name, value in verdict.items() if isinstance(value, int)}
    report.problems += [str(problem) for problem in verdict["problems"]]
    for pod in release.pods():
        for status in pod["status"].get("containerStatuses", ()):
            if status["restartCount"]:
                report.restarts[pod["metadata"]["name"]] = status["restartCount"]


def uninstall(release: Release) -> None:
    """Uninstalls the release and notes what is left of it."""
    with release.step("uninstall"):
        release.follow(FIRST_STEPS, commands=commands_of(ROOT / "docs" / FIRST_STEPS)[-1:])
    label = f"app.kubernetes.io/instance={RELEASE}"
    processes = f"{label},tentalis.io/role notin (test)"
    wait_for("the pods are gone", 120, lambda: not release.cluster.get("pods", "-n", NAMESPACE, "-l", processes))
    kinds = "all,configmaps,secrets,persistentvolumeclaims,serviceaccounts,poddisruptionbudgets,networkpolicies"
    release.report.left = sorted(
        f"{each['kind']}/{each['metadata']['name']}"
        for each in release.cluster.get(kinds, "-n", NAMESPACE, "-l", label)
    )
