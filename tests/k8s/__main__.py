"""Installs the chart on a real cluster with images built here, and lives through what happens to a release.

    make test-k8s [ARGS='--keep']

The cluster is that of KUBECONFIG (with --import COMMAND, which gives its nodes the images: `k3s ctr images import -`).
Without KUBECONFIG, and as root, it is one of two nodes made here, of programs built from their Go modules. The images
need a Docker engine, or dockerd. The commands of docs/start/helm.md install, test and uninstall the release.
--several-nodes runs the shorter scenario of `several_nodes.py` in the place of the long one.

The last line on stdout is one JSON object; the exit code is 1 if there were problems, which stderr names. --write
replaces the figures in docs/results/kubernetes.md, or those of the shorter scenario in docs/results/several-nodes.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.docker.engine import Docker, NotAvailable, engine, say
from tests.docker.images import TARGETS, build_images, tag_of
from tests.k8s import cluster as clusters
from tests.k8s import scenario, several_nodes, store
from tests.k8s.scenario import NAMESPACE, RELEASE, SETTLED_S, Release, ReleaseReport, Report, operator_of
from tests.k8s.several_nodes import SeveralNodesReport
from tests.support import ROOT
from tests.support.transcript import PageMismatch

RESULTS = ROOT / "docs" / "results"
PAGES = {Report: RESULTS / "kubernetes.md", SeveralNodesReport: RESULTS / "several-nodes.md"}


def images(docker: Docker, scratch: Path, kafka: str, report: ReleaseReport) -> list[str]:
    """Returns the names of the images of a scenario. Gives those of the product a second tag for the long one, which
    upgrades to it; builds that of the object store for the other."""
    if isinstance(report, SeveralNodesReport):
        base = store.base_image(report.bases)
        return [kafka, *map(tag_of, TARGETS), store.build_image(docker, scratch, base)]
    names = [kafka]
    for target in TARGETS:
        following = tag_of(target).replace(":test", ":next")
        docker("tag", tag_of(target), following)
        names += [tag_of(target), following]
    return names


def values(kafka: str, policies: bool) -> dict[str, Any]:
    """Returns the values beside those of the trial: the images, network policies if the cluster enforces them, little
    CPU asked for, and small steps."""
    return {
        # The model comes from the package index.
        "networkPolicy": {"enabled": policies, "externalEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}]},
        "image": {"registry": "docker.io", "repository": "tentalis-test", "tag": "test"},
        "kafka": {"embedded": {"image": kafka, "resources": {"requests": {"cpu": "10m"}}}},
        "defaults": {"resources": {"requests": {"cpu": "10m", "memory": "128Mi"}}},
        "trainer": {"config": {"batch_rollouts": 16}},
        "roles": {
            "model": {"resources": {"requests": {"cpu": "10m", "memory": "512Mi"}}},
            "trainer": {"resources": {"requests": {"cpu": "10m", "memory": "512Mi"}}},
        },
    }


def describe(made: clusters.Cluster) -> str:
    """Returns the version of the cluster and its number of nodes."""
    version = json.loads(made.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    nodes = made.get("nodes")
    runtime = nodes[0]["status"]["nodeInfo"]["containerRuntimeVersion"]
    return f"Kubernetes {version}, {len(nodes)} node(s), {runtime}"


def show(made: clusters.Cluster) -> None:
    """Prints what helps to understand a failure."""
    for command in (
        ("get", "pods,jobs,pvc", "-n", NAMESPACE, "-o", "wide"),
        ("get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp"),
        ("logs", "-n", NAMESPACE, "-l", f"app.kubernetes.io/instance={RELEASE}", "--tail=15", "--all-containers",
         "--prefix", "--max-log-requests=50"),
    ):  # fmt: skip
        print(made.kubectl(*command, check=False)[-12_000:], file=sys.stderr)


def write(report: ReleaseReport) -> None:
    """Writes the page of results."""
    page = PAGES[type(report)]
    head = page.read_text(encoding="utf-8").partition("```json")[0]
    page.write_text(f"{head}```json\n{json.dumps(vars(report), indent=1)}\n```\n", encoding="utf-8")


def live(release: Release, report: ReleaseReport) -> None:
    """Runs the scenario of a report."""
    if isinstance(report, SeveralNodesReport):
        several_nodes.life(release, report)
    elif isinstance(report, Report):
        scenario.life(release, report)


def run(options: argparse.Namespace, report: ReleaseReport) -> None:
    """Builds the images, gets a cluster and runs the scenario. Raises what the modules of this test raise."""
    scratch = options.scratch.absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    with engine(scratch.parent / "docker", with_compose=False) as docker:
        kafka = build_images(docker, scratch.parent / "docker", TARGETS, report)
        importer = shlex.split(options.importer)
        with clusters.cluster(docker, scratch, importer, options.keep, options.drain, options.policies) as made:
            report.cluster = describe(made)
            say(report.cluster)
            made.load(docker, images(docker, scratch.parent / "docker", kafka, report))
            say("the nodes have the images")
            changes = values(kafka, made.enforces)
            if isinstance(report, SeveralNodesReport):
                changes = several_nodes.values(changes)
            try:
                with operator_of(made, scratch, changes) as operator:
                    live(Release(made, scratch, changes, report, operator, options.settle), report)
            except BaseException:
                show(made)
                raise
            finally:
                if not options.keep:
                    made.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout=300, check=False)


def up(scratch: Path) -> None:
    """Makes a cluster that stays. Raises what the modules of this test raise."""
    scratch.mkdir(parents=True, exist_ok=True)
    with engine(scratch.parent / "docker", with_compose=False) as docker, clusters.own(docker, scratch, True):
        pass


def main() -> int:
    """Runs the test; returns its exit code."""
    parser = argparse.ArgumentParser(prog="make test-k8s", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--import", dest="importer", default="", help="command that gives the nodes of KUBECONFIG images"
    )
    parser.add_argument("--drain", action="store_true", help="drain the nodes of KUBECONFIG too, one after another")
    parser.add_argument(
        "--policies", action="store_true", help="the cluster of KUBECONFIG enforces network policies: try them too"
    )
    parser.add_argument("--keep", action="store_true", help="leave release and cluster running")
    parser.add_argument("--up", action="store_true", help="only make a cluster here, which stays; see --down")
    parser.add_argument("--down", action="store_true", help="only end a cluster that --keep or --up left")
    parser.add_argument(
        "--settle", type=int, default=SETTLED_S, metavar="S", help="seconds to wait for open tasks before the verifier"
    )
    parser.add_argument(
        "--several-nodes", action="store_true", help="the short scenario: a trainer on two nodes, and an object store"
    )
    parser.add_argument("--write", action="store_true", help="write the page of results")
    parser.add_argument("--scratch", type=Path, default=ROOT / ".tentalis" / "k8s", help="data of an own cluster")
    options = parser.parse_args()
    if options.down:
        clusters.down(options.scratch.absolute())
        return 0
    report: ReleaseReport = SeveralNodesReport() if options.several_nodes else Report()
    try:
        if options.up:
            up(options.scratch.absolute())
            return 0
        run(options, report)
    except (NotAvailable, PageMismatch, RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
        report.problems.append(str(error))
    if options.write:
        write(report)
    print(json.dumps(vars(report), indent=1), file=sys.stderr)
    for problem in report.problems:
        print(f"problem: {problem}", file=sys.stderr)
    print(json.dumps(report.summary()))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
