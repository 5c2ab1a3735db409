"""The nodes of the cluster that is made here: each has a network namespace, a containerd, a kubelet, a kube-proxy and a
kube-router, which enforces network policies.

The first one runs the processes of the control plane too. The namespaces are joined by a bridge of this machine, and
the nodes see the same folders of volumes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BRIDGE, HOST, NODE_NET = "tentalis-k8s", "10.253.0.254", "10.253.0.0/24"
ALL_PODS, SERVICE_NET = "10.254.0.0/16", "10.252.0.0/16"
PAUSE = "tentalis-test/pause:1"
PLUGINS = Path("/usr/lib/cni")


@dataclass(frozen=True, slots=True)
class Node:
    """A node by its number, from 1."""

    number: int

    @property
    def name(self) -> str:
        return f"node{self.number}"

    @property
    def address(self) -> str:
        return f"10.253.0.{self.number}"

    @property
    def pods(self) -> str:
        return f"10.254.{self.number}.0/24"

    @property
    def namespace(self) -> str:
        return f"{BRIDGE}-{self.number}"

    def folder(self, scratch: Path) -> Path:
        return scratch / self.name

    def socket(self, scratch: Path) -> Path:
        return self.folder(scratch) / "containerd.sock"


NODES = (Node(1), Node(2))
MASTER = NODES[0]


def options(values: dict[str, str]) -> list[str]:
    """Returns the options of a command."""
    return [f"--{name}={value}" for name, value in values.items()]


def start(scratch: Path, node: Node, name: str, command: Sequence[str]) -> None:
    """Starts a process in the network of a node."""
    with (scratch / f"{name}.log").open("ab") as log:
        # `ip netns exec` would hide the control groups.
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{node.namespace}", *command], stdout=log, stderr=log, start_new_session=True
        )
    with (scratch / "processes").open("a") as file:
        file.write(f"{process.pid} {node.name} {command[0]}\n")


def started(scratch: Path, node: Node | None = None) -> Iterator[tuple[int, str]]:
    """Yields process id and program of each process that was started, on one node or all."""
    listed = scratch / "processes"
    for line in listed.read_text().splitlines() if listed.exists() else ():
        pid, name, program = line.split(" ", 2)
        if node is None or name == node.name:
            yield int(pid), Path(program).name


def runs(pid: int, name: str) -> bool:
    """True if a process runs and is that program."""
    with suppress(OSError):
        return name in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def end(pid: int, name: str) -> None:
    """Ends a process, by force if it does not end."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if not runs(pid, name):
                return
            time.sleep(0.1)


def end_containers(scratch: Path, node: Node) -> None:
    """Ends the containers of a node, whose containerd still runs."""
    if not node.socket(scratch).exists():
        return
    tasks = ("ctr", "-a", str(node.socket(scratch)), "-n", "k8s.io", "tasks")
    listed = subprocess.run([*tasks, "ls", "-q"], capture_output=True, text=True, check=False)
    for task in listed.stdout.split():
        subprocess.run([*tasks, "delete", "--force", task], capture_output=True, check=False)


def join_networks() -> None:
    """Makes the namespaces of the nodes, joined to each other and to this machine, which leads pods to the outside."""
    commands = f"""
        ip link add {BRIDGE} type bridge
        ip addr add {HOST}/24 dev {BRIDGE}
        ip link set {BRIDGE} up
        sysctl -q -w net.ipv4.ip_forward=1
    """
    for node in NODES:
        inside = f"ip -n {node.namespace}"
        commands += f"""
            ip netns add {node.namespace}
            ip link add {node.namespace} type veth peer name node netns {node.namespace}
            ip link set {node.namespace} master {BRIDGE} up
            {inside} addr add {node.address}/24 dev node
            {inside} link set lo up
            {inside} link set node up
            {inside} route add default via {HOST}
        """
        for other in NODES:
            if other != node:
                commands += f"{inside} route add {other.pods} via {other.address}\n"
        # Pods reach each other under their own addresses: network policies know them by these.
        outside = f"-s {node.pods} ! -d {ALL_PODS} -j MASQUERADE"
        commands += f"ip netns exec {node.namespace} iptables -t nat -A POSTROUTING {outside}\n"
    for line in filter(None, map(str.strip, commands.splitlines())):
        subprocess.run(line.split(), check=True)
    for rule in _rules("-I"):
        subprocess.run(["iptables", *rule], check=True)


def remove_networks() -> None:
    """Removes what `join_networks` made."""
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        for rule in _rules("-D"):
            subprocess.run(["iptables", *rule], check=False, capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], check=True)
    for node in NODES:
        if Path(f"/run/netns/{node.namespace}").exists():
            subprocess.run(["ip", "netns", "delete", node.namespace], check=True)


def _rules(how: str) -> list[list[str]]:
    return [
        [how, "FORWARD", "-i", BRIDGE, "-j", "ACCEPT"],
        [how, "FORWARD", "-o", BRIDGE, "-j", "ACCEPT"],
        ["-t", "nat", how, "POSTROUTING", "-s", NODE_NET, "!", "-o", BRIDGE, "-j", "MASQUERADE"],
    ]


def write_files(scratch: Path, node: Node) -> None:
    """Writes the settings of the processes of a node. The user of its kubelet is that of `scratch/NAME.kubeconfig`."""
    folder = node.folder(scratch)
    (folder / "cni").mkdir(parents=True, exist_ok=True)
    socket = f"unix://{node.socket(scratch)}"
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,  # else a kubelet ends the pods of the other one, whose groups it finds
        "failSwapOn": False,
        "failCgroupV1": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [MASTER.address],
        "resolvConf": "",
        "containerRuntimeEndpoint": socket,
        "imageServiceEndpoint": socket,
        "podLogsDir": str(folder / "pods"),
        "volumePluginDir": str(folder / "plugins"),
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "50Mi"},
        "enforceNodeAllocatable": [],
        "imageGCHighThresholdPercent": 100,  # removed images could not be pulled again
        "nodeStatusUpdateFrequency": "2s",
    }
    (folder / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
    (folder / "containerd.toml").write_text(CONTAINERD.format(folder=folder, pause=PAUSE, plugins=PLUGINS))
    (folder / "cni" / "10-bridge.conflist").write_text(json.dumps(_pod_network(folder, node)))


def _pod_network(folder: Path, node: Node) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": str(folder / "addresses"),
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge | {"ipam": addresses}]}


def start_processes(scratch: Path, node: Node, programs: Path) -> None:
    """Starts the processes of a node."""
    folder = node.folder(scratch)
    _start_containerd(scratch, node)
    kubelet = {
        "config": str(folder / "kubelet.yaml"),
        "kubeconfig": str(scratch / f"{node.name}.kubeconfig"),
        "hostname-override": node.name,
        "node-ip": node.address,
        "root-dir": str(folder / "kubelet"),
        "cert-dir": str(folder / "certificates"),
    }
    start(scratch, node, f"kubelet-{node.name}", [str(programs / "kubelet"), *options(kubelet)])
    proxy = {
        "kubeconfig": str(scratch / "admin.kubeconfig"),
        "hostname-override": node.name,
        "proxy-mode": "iptables",
        "cluster-cidr": ALL_PODS,
        "conntrack-max-per-core": "0",
        "conntrack-tcp-timeout-established": "0",
        "conntrack-tcp-timeout-close-wait": "0",
        "bind-address": "127.0.0.1",
    }
    start(scratch, node, f"kube-proxy-{node.name}", [str(programs / "kube-proxy"), *options(proxy)])


def start_firewall(scratch: Path, node: Node, programs: Path) -> None:
    """Starts what enforces the network policies of the pods of a node, which must be registered."""
    firewall = {
        "run-firewall": "true",
        "run-router": "false",
        "run-service-proxy": "false",
        "kubeconfig": str(scratch / "admin.kubeconfig"),
        "hostname-override": node.name,
        "service-cluster-ip-range": SERVICE_NET,
        "health-port": "0",
    }
    start(scratch, node, f"kube-router-{node.name}", [str(programs / "kube-router"), *options(firewall)])


def _start_containerd(scratch: Path, node: Node) -> None:
    command = ["containerd", "--config", str(node.folder(scratch) / "containerd.toml")]
    start(scratch, node, f"containerd-{node.name}", command)
    deadline = time.monotonic() + 60
    while subprocess.run(
        ["ctr", "-a", str(node.socket(scratch)), "version"], capture_output=True, check=False
    ).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"containerd does not start: see {scratch}/containerd-{node.name}.log")
        time.sleep(0.5)


def import_command(scratch: Path) -> list[str]:
    """Returns the command that gives the nodes the images of an archive on its standard input."""
    return [sys.executable, "-m", "tests.k8s.import_images", str(scratch)]


def import_images(scratch: Path) -> None:
    """Gives the nodes the images of an archive on the standard input. The store of the first node is linked to the
    others, which must run no pods: images take no more disk than once."""
    ctr = ["ctr", "-a", str(MASTER.socket(scratch)), "-n", "k8s.io", "images", "import", "-"]
    subprocess.run(ctr, check=True)
    for node in NODES[1:]:
        for pid, name in started(scratch, node):
            if name == "containerd" and runs(pid, name):
                end(pid, name)
        _link_store(MASTER.folder(scratch) / "containerd" / "root", node.folder(scratch) / "containerd" / "root")
        _start_containerd(scratch, node)


def _link_store(source: Path, target: Path) -> None:
    """Replaces a store of images by hard links to another one: layers never change. Its databases are copied."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", "--link", str(source), str(target)], check=True)
    for database in source.rglob("*.db"):
        copy = target / database.relative_to(source)
        copy.unlink()
        shutil.copy2(database, copy)


CONTAINERD = """\
version = 2
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", \
"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
"""
