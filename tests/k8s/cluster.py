"""The cluster of the test: one that is given by KUBECONFIG, or one made here of two nodes (`nodes.py`)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.docker.engine import Docker, NotAvailable, build, say
from tests.k8s import nodes, parts
from tests.k8s.nodes import MASTER, NODES, PAUSE, SERVICE_NET, start

HELM = Path(sys.executable).with_name("helm")
API = f"https://{MASTER.address}:16443"
USERS = {"admin": "admin,admin,system:masters"}
USERS |= {node.name: f"system:node:{node.name},{node.name},system:nodes" for node in NODES}
USERS |= {name: f"system:{name},{name}" for name in ("kube-controller-manager", "kube-scheduler")}
# The kubelet sets these for the whole machine.
MACHINE = [Path("/proc/sys") / name for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")]
NEEDS = {
    "containerd": "containerd",
    "runc": "runc",
    "ctr": "containerd",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}


@dataclass
class Cluster:
    """Commands to one cluster. `importer`: a command that takes an archive of images on its standard input. `loaded`: a
    file that lists the images which the nodes have already. `drain`: its nodes may be drained. `enforces`: its network
    keeps the connections that network policies forbid closed.
    """

    kubectl_path: str
    kubeconfig: str
    importer: Sequence[str]
    loaded: Path | None = None
    drain: bool = False
    enforces: bool = False

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"KUBECONFIG": self.kubeconfig}

    def kubectl(self, *arguments: str, timeout: float = 120.0, check: bool = True, given: str | None = None) -> str:
        """Returns the output of kubectl. Raises RuntimeError with the end of it."""
        return self._run([self.kubectl_path, *arguments], timeout, check, given)

    def helm(self, *arguments: str, timeout: float = 1800.0) -> str:
        """Returns the output of helm. Raises RuntimeError with the end of it."""
        return self._run([str(HELM), *arguments], timeout, True, None)

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        """Returns the items of `kubectl get ARGUMENTS`."""
        items: list[dict[str, Any]] = json.loads(self.kubectl("get", *arguments, "-o", "json"))["items"]
        return items

    def _run(self, command: list[str], timeout: float, check: bool, given: str | None) -> str:
        done = subprocess.run(
            command, env=self.env, input=given, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            said = (done.stdout + done.stderr)[-4000:]
            raise RuntimeError(f"{' '.join(command[:6])} ... ended with {done.returncode}:\n{said}")
        return done.stdout

    def load(self, docker: Docker, images: Sequence[str]) -> None:
        """Copies images of a Docker engine to the nodes, those that they have aside."""
        known = json.loads(self.loaded.read_text()) if self.loaded and self.loaded.exists() else {}
        ids = {name: docker("image", "inspect", "--format", "{{.Id}}", name).strip() for name in images}
        missing = [name for name in images if known.get(name) != ids[name]]
        if not missing:
            return
        save = ["docker", "save", *missing]
        with subprocess.Popen(save, env=os.environ | docker.env, stdout=subprocess.PIPE) as saved:
            done = subprocess.run(self.importer, stdin=saved.stdout, capture_output=True, text=True, check=False)
        if done.returncode or saved.returncode:
            raise RuntimeError(f"the nodes did not take the images:\n{(done.stdout + done.stderr)[-4000:]}")
        if self.loaded:
            self.loaded.write_text(json.dumps(known | ids))


@contextmanager
def cluster(
    docker: Docker, scratch: Path, importer: Sequence[str], keep: bool, drain: bool = False, enforces: bool = False
) -> Iterator[Cluster]:
    """Yields the cluster of KUBECONFIG if that is set, else one of this machine's own. `drain`, `enforces`: for the
    former. Raises NotAvailable."""
    given = os.environ.get("KUBECONFIG")
    if not given:
        with own(docker, scratch, keep) as made:
            yield made
        return
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise NotAvailable("KUBECONFIG names a cluster, but there is no kubectl on the path")
    if not importer:
        raise NotAvailable(
            "KUBECONFIG names a cluster: say with --import how its nodes get images, by a command that reads an "
            "archive of docker save, such as --import 'k3s ctr images import -' or "
            "--import 'kind load image-archive /dev/stdin'"
        )
    found = Cluster(kubectl, given, importer, drain=drain, enforces=enforces)
    found.kubectl("get", "--raw", "/readyz")
    yield found


def require() -> None:
    """Raises NotAvailable, with what to install, if a cluster cannot be made on this machine."""
    if os.geteuid() != 0:
        raise NotAvailable("no KUBECONFIG, and only root can make a cluster on this machine")
    missing = {package for program, package in NEEDS.items() if shutil.which(program) is None}
    if not (nodes.PLUGINS / "bridge").exists():
        missing.add("containernetworking-plugins")
    if missing:
        raise NotAvailable(
            f"no KUBECONFIG, and a cluster on this machine needs: apt-get install {' '.join(sorted(missing))}"
        )


@contextmanager
def own(docker: Docker, scratch: Path, keep: bool) -> Iterator[Cluster]:
    """Yields a cluster whose data is in `scratch`; gone afterwards, unless `keep`."""
    require()
    programs = parts.built(parts_folder())
    made = Cluster(
        str(programs / "kubectl"),
        str(scratch / "admin.kubeconfig"),
        nodes.import_command(scratch),
        scratch / "images.json",
        drain=True,
        enforces=True,
    )
    if not answers(made):
        down(scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            _up(scratch, programs, made)
            _pause(docker, programs, made, scratch)
        except BaseException:
            down(scratch)
            raise
    try:
        yield made
    finally:
        if keep:
            say(f"the cluster stays: export KUBECONFIG={made.kubeconfig}; kubectl is in {programs}")
            say(f"to give it images: --import '{shlex.join(made.importer)}'; its end: make test-k8s ARGS=--down")
        else:
            down(scratch)


def parts_folder() -> Path:
    from tentalis.local.jars import cache_dir

    return cache_dir() / f"kubernetes-{parts.KUBERNETES}"


def answers(made: Cluster) -> bool:
    """True if the API server answers."""
    with suppress(RuntimeError, subprocess.TimeoutExpired):
        made.kubectl("get", "--raw", "/readyz", "--request-timeout=3s")
        return Path(made.kubeconfig).exists()
    return False


def _up(scratch: Path, programs: Path, made: Cluster) -> None:
    """Starts every process of the cluster, in the network namespace of its node."""
    began = time.monotonic()
    machine = {str(path): path.read_text() for path in MACHINE}
    (scratch / "machine.json").write_text(json.dumps({"settings": machine, "networks": _networks()}))
    nodes.join_networks()
    _files(scratch)
    etcd = ["--data-dir", str(scratch / "etcd"), "--unsafe-no-fsync", "--log-level", "warn"]
    etcd += ["--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379"]
    start(scratch, MASTER, "etcd", [str(programs / "etcd"), *etcd, "--listen-peer-urls", "http://127.0.0.1:2380"])
    api = {
        "etcd-servers": "http://127.0.0.1:2379",
        "bind-address": "0.0.0.0",
        "advertise-address": MASTER.address,
        "secure-port": "16443",
        "cert-dir": str(scratch / "certificates"),
        "service-cluster-ip-range": SERVICE_NET,
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": str(scratch / "accounts.key"),
        "service-account-signing-key-file": str(scratch / "accounts.key"),
        "authorization-mode": "Node,RBAC",
        "token-auth-file": str(scratch / "tokens.csv"),
        "endpoint-reconciler-type": "lease",
        "kubelet-preferred-address-types": "InternalIP",
        "allow-privileged": "true",
    }
    start(scratch, MASTER, "kube-apiserver", [str(programs / "kube-apiserver"), *nodes.options(api)])
    _wait(scratch, "kube-apiserver", 60, lambda: answers(made))
    manager = {
        "kubeconfig": str(scratch / "kube-controller-manager.kubeconfig"),
        "bind-address": "127.0.0.1",
        "cert-dir": str(scratch / "manager"),
        "leader-elect": "false",
        "root-ca-file": str(scratch / "certificates" / "apiserver.crt"),
        "service-account-private-key-file": str(scratch / "accounts.key"),
        "use-service-account-credentials": "true",
        "controllers": "*,-nodeipam,-cloud-node-lifecycle,-service-lb-controller,-node-route-controller",
    }
    start(
        scratch, MASTER, "kube-controller-manager", [str(programs / "kube-controller-manager"), *nodes.options(manager)]
    )
    scheduler = {
        "kubeconfig": str(scratch / "kube-scheduler.kubeconfig"),
        "bind-address": "127.0.0.1",
        "cert-dir": str(scratch / "scheduler"),
        "leader-elect": "false",
    }
    start(scratch, MASTER, "kube-scheduler", [str(programs / "kube-scheduler"), *nodes.options(scheduler)])
    for node in NODES:
        nodes.start_processes(scratch, node, programs)
    start(scratch, MASTER, "coredns", [str(programs / "coredns"), "-conf", str(scratch / "Corefile")])
    ready = ("get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}")
    _wait(scratch, "kubelet", 120, lambda: made.kubectl(*ready, check=False).split() == ["True"] * len(NODES))
    for node in NODES:
        nodes.start_firewall(scratch, node, programs)
    made.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(_storage(scratch)))
    say(f"the cluster is ready after {time.monotonic() - began:.0f} s")


def _wait(scratch: Path, name: str, seconds: float, check: Any) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise NotAvailable(f"{name} is not ready within {seconds:g} s: see {scratch}/{name}.log")
        time.sleep(0.5)


def _files(scratch: Path) -> None:
    """Writes the settings of every process."""
    tokens = {name: f"token-of-{name}" for name in USERS}
    (scratch / "tokens.csv").write_text(
        "".join(
            f'{tokens[name]},{user.split(",")[0]},{user.split(",")[1]},"{",".join(user.split(",")[2:])}"\n'
            for name, user in USERS.items()
        )
    )
    for name, token in tokens.items():
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        (scratch / f"{name}.kubeconfig").write_text(yaml.safe_dump(config))
        (scratch / f"{name}.kubeconfig").chmod(0o600)
    if not (scratch / "accounts.key").exists():
        key = ["openssl", "genrsa", "-out", str(scratch / "accounts.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True)
    for node in NODES:
        nodes.write_files(scratch, node)
    (scratch / "Corefile").write_text(
        f"cluster.local:53 {{\n bind {MASTER.address}\n errors\n kubernetes cluster.local {{\n"
        f"  kubeconfig {scratch}/admin.kubeconfig\n  pods insecure\n }}\n}}\n"
        f".:53 {{\n bind {MASTER.address}\n errors\n forward . /etc/resolv.conf\n}}\n"
    )


def _storage(scratch: Path, volumes: int = 6) -> Iterator[dict[str, Any]]:
    """Yields a default storage class, and folders as its volumes, which both nodes see."""
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    yield {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "folders", "annotations": default},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name for node in NODES]}
    for number in range(volumes):
        folder = scratch / "volumes" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        yield {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"folder-{number}"},
            "spec": {
                "capacity": {"storage": "100Gi"},
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "folders",
                "local": {"path": str(folder)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        }


def _pause(docker: Docker, programs: Path, made: Cluster, scratch: Path) -> None:
    """Gives the nodes the image of a pod's sandbox."""
    context = scratch / "pause"
    context.mkdir(exist_ok=True)
    shutil.copy(programs / "pause", context / "pause")
    (context / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nUSER 65534\nENTRYPOINT ["/pause"]\n')
    build(docker, context, PAUSE)
    made.load(docker, [PAUSE])


def down(scratch: Path) -> None:
    """Ends every process and container of a cluster, and removes its data. The images of its node go with it."""
    running = [each for each in nodes.started(scratch) if nodes.runs(*each)]
    for pid, name in running:
        if name != "containerd":
            nodes.end(pid, name)
    for node in NODES:
        nodes.end_containers(scratch, node)
    for pid, name in running:
        if name == "containerd":
            nodes.end(pid, name)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed([each for each in mounts if each.startswith(f"{scratch}/")]):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
    if (scratch / "machine.json").exists():
        before = json.loads((scratch / "machine.json").read_text())
        for path, value in before["settings"].items():
            Path(path).write_text(value)
        for name in set(_networks()) - {*before["networks"]}:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    nodes.remove_networks()
    if scratch.exists():
        shutil.rmtree(scratch)


def _networks() -> list[str]:
    """Returns the network namespaces of pods."""
    return sorted(path.name for path in Path("/run/netns").glob("cni-*"))
