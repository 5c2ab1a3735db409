"""The trainer on two nodes, and an object store: install, kill each rank, an outage of the store, verify, uninstall."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from schemas import topics
from tests.docker.engine import say, wait_for
from tests.k8s.scenario import (
    NAMESPACE,
    RELEASE,
    Release,
    ReleaseReport,
    Values,
    install,
    stop_load,
    uninstall,
    verify,
)
from tests.k8s.store import ENDPOINT, SECRET, URL, StorePod

RANKS = 2
OUTAGE_S = 45.0
"""Seconds of each kind of outage, from the first request that was refused."""
LEARNS_S = 900.0


@dataclass
class SeveralNodesReport(ReleaseReport):
    """The figures of a run; `problems` is empty if it went well."""

    pods: dict[str, str] = field(default_factory=dict)  # of trainer, policies and model: the node of each
    trained: dict[str, list[int]] = field(default_factory=dict)  # the last step when all was ready, and a later one
    fetched: str = ""  # what the new pod of rank 0 says of its checkpoint
    refused: int = 0  # requests that the store answered with 503
    model_reads: int = 0  # requests of the model server that the store answered
    objects: dict[str, int] = field(default_factory=dict)  # in the store at the end, by the first part of their keys
    steps: int = 0  # planned
    rollouts_of_rank: dict[str, int] = field(default_factory=dict)


def values(trial: Values) -> Values:
    """Returns the values of the release: two pods of one rank each, on different nodes, and the store in the place of a
    claim. `trial`: those of the other scenario."""
    found = deepcopy(trial)
    found["trainer"] = {"nodes": RANKS, "config": {"batch_rollouts": 16, "threads": 1}}
    found["storage"] = {"url": URL, "credentialsSecret": SECRET}
    found["defaults"]["env"] = [{"name": "AWS_ENDPOINT_URL_S3", "value": ENDPOINT}]
    port = int(ENDPOINT.rpartition(":")[2])
    found["networkPolicy"]["externalEgress"][0]["ports"].append({"port": port, "protocol": "TCP"})
    return found


def life(release: Release, report: SeveralNodesReport) -> None:
    """Runs the whole scenario."""
    store = StorePod(release.cluster, NAMESPACE)
    with release.step("object store"):
        store.begin()
    install(release)
    look_at_pods(release, report)
    read_by_model(release, store, report)
    for number in (1, 0):
        kill(release, report, f"{RELEASE}-trainer-{number}")
    report.fetched = fetched(release)
    if not report.fetched:
        report.problems.append("the new pod of rank 0 took no checkpoint from the object store")
    outage(release, report, store)
    report.refused = store.answered(503)
    read_by_model(release, store, report)
    stop_load(release)
    verify(release)
    look_at_plans(release, report)
    report.objects = dict(Counter("/".join(key.split("/")[1:3]) for key in store.objects()))
    uninstall(release)


def look_at_pods(release: Release, report: SeveralNodesReport) -> None:
    """Notes where the pods that use the store run; the ranks must be on different nodes."""
    roles = ("trainer", "policies", "model")
    report.pods = {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in release.pods()
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] in roles
    }
    trainers = [node for name, node in report.pods.items() if name.startswith(f"{RELEASE}-trainer-")]
    if len(trainers) != RANKS or len(set(trainers)) != min(RANKS, len(release.cluster.get("nodes"))):
        report.problems.append(f"the ranks are not spread: {report.pods}")
    say(f"pods: {report.pods}")


def read_by_model(release: Release, store: StorePod, report: SeveralNodesReport) -> None:
    """Counts what the model server has read: the adapter that it serves came from the store."""
    labels = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=model"
    (pod,) = release.cluster.get("pods", "-n", NAMESPACE, "-l", labels)
    before, report.model_reads = report.model_reads, store.answered(200, pod["status"]["podIP"])
    if report.model_reads <= before:
        report.problems.append("the model server has read nothing more from the object store")


def kill(release: Release, report: SeveralNodesReport, name: str) -> None:
    """Kills a pod without grace; training must continue with a new one in its place."""
    with release.step(f"{name} killed"):
        before = uid(release, name)
        release.kill(name)
        wait_for(f"a new pod {name}", LEARNS_S, lambda: uid(release, name) not in ("", before))
        learns_again(release, report, f"{name} killed")


def uid(release: Release, name: str) -> str:
    """Returns the uid of a pod, "" if there is none."""
    found = release.cluster.kubectl(
        "get", "pod", name, "-n", NAMESPACE, "-o", "jsonpath={.metadata.uid}", "--ignore-not-found"
    )
    return found.strip()


def learns_again(release: Release, report: SeveralNodesReport, what: str) -> None:
    """Waits until everything is ready, and then until a newer step is trained and a newer adapter is served than at
    that time."""
    release.wait_ready(what)
    served = release.report.served
    step = wait_for("the newest step", LEARNS_S, lambda: newest_step(release), every=10.0)
    served[f"{what}: ready again"] = release.served() or [*served.values()][-1]

    def later() -> int:
        newest = newest_step(release)
        return newest if newest > step else 0

    report.trained[what] = [step, wait_for(f"a step after {step}", LEARNS_S, later, every=10.0)]
    release.wait_learned(what)


def newest_step(release: Release) -> int:
    """Returns the last step whose adapter was announced, 0 for none."""
    with suppress(ValueError):
        return max(row["step"] or 0 for row in json.loads(release.inside("tentalis", "policy", "list", "-o", "json")))
    return 0


def fetched(release: Release) -> str:
    """Returns what rank 0 says of the checkpoint that it took from the store, "" if it took none. Its container may
    have been restarted since."""
    logs = ("logs", "-n", NAMESPACE, f"{RELEASE}-trainer-0", "-c", "trainer")
    said = release.cluster.kubectl(*logs, "--previous", check=False) + release.cluster.kubectl(*logs)
    begins = "fetched the checkpoint of step"
    found = [line[line.index(begins) :] for line in said.splitlines() if begins in line]
    return found[-1] if found else ""


def outage(release: Release, report: SeveralNodesReport, store: StorePod) -> None:
    """Lets the store answer 503, and then no connection be made at all; training must continue when it is back."""
    with release.step("object store away"):
        store.refuse()
        wait_for("the store refuses a request", LEARNS_S, lambda: store.answered(503))
        time.sleep(OUTAGE_S)
        say("no connection to the store")
        store.vanish()
        time.sleep(OUTAGE_S)
        store.come_back()
        say("the store is back")
        learns_again(release, report, "object store away")


def look_at_plans(release: Release, report: SeveralNodesReport) -> None:
    """Counts the rollouts of each rank in the plans of the steps: every step must be of both."""
    said = release.inside("tentalis", "consume", topics.BATCHES, "--exit", "-o", "json")
    plans: list[dict[str, Any]] = []
    for line in said.splitlines():
        record = json.loads(line)
        if record["type"] == "BatchPlan" and record["value"]["rows"]:
            plans.append(record["value"])
    report.steps = len({plan["step"] for plan in plans})
    ranks = Counter(row["rank"] for plan in plans for row in plan["rows"])
    report.rollouts_of_rank = {str(rank): count for rank, count in sorted(ranks.items())}
    alone = [plan["step"] for plan in plans if {row["rank"] for row in plan["rows"]} != set(range(RANKS))]
    if not plans or alone:
        report.problems.append(f"{len(plans)} plans; steps without a rollout for each of {RANKS} ranks: {alone}")
