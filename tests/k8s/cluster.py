"""The cluster of the test: one that is given by KUBECONFIG, or one node made here in a network namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
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
from tests.k8s import parts

HELM = Path(sys.executable).with_name("helm")
NETNS, NEAR, FAR = "tentalis-k8s", "tentalis-k8s", "tentalis-node"
NODE, HOST, NODE_NET = "10.253.0.1", "10.253.0.254", "10.253.0.0/24"
POD_NET, SERVICE_NET = "10.254.0.0/24", "10.252.0.0/16"
API = f"https://{NODE}:16443"
USERS = {"admin": "admin,admin,system:masters", "node": "system:node:node1,node1,system:nodes"}
USERS |= {name: f"system:{name},{name}" for name in ("kube-controller-manager", "kube-scheduler")}
PAUSE = "tentalis-test/pause:1"
PLUGINS = Path("/usr/lib/cni")
# The kubelet sets these for the whole machine.
MACHINE = [Path("/proc/sys") / name for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")]
NEEDS = {
    "containerd": "containerd",
    "runc": "runc",
    "ctr": "containerd",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}


@dataclass
class Cluster:
    """Commands to one cluster. `importer`: a command that takes an archive of images on its standard input. `loaded`: a
    file that lists the images which the node has already.
    """

    kubectl_path: str
    kubeconfig: str
    importer: Sequence[str]
    loaded: Path | None = None

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
        """Copies images of a Docker engine to the node, those that it has aside."""
        known = json.loads(self.loaded.read_text()) if self.loaded and self.loaded.exists() else {}
        ids = {name: docker("image", "inspect", "--format", "{{.Id}}", name).strip() for name in images}
        missing = [name for name in images if known.get(name) != ids[name]]
        if not missing:
            return
        save = ["docker", "save", *missing]
        with subprocess.Popen(save, env=os.environ | docker.env, stdout=subprocess.PIPE) as saved:
            done = subprocess.run(self.importer, stdin=saved.stdout, capture_output=True, text=True, check=False)
        if done.returncode or saved.returncode:
            raise RuntimeError(f"the node did not take the images:\n{(done.stdout + done.stderr)[-4000:]}")
        if self.loaded:
            self.loaded.write_text(json.dumps(known | ids))


@contextmanager
def cluster(docker: Docker, scratch: Path, importer: Sequence[str], keep: bool) -> Iterator[Cluster]:
    """Yields the cluster of KUBECONFIG if that is set, else one of this machine's own. Raises NotAvailable."""
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
    found = Cluster(kubectl, given, importer)
    found.kubectl("get", "--raw", "/readyz")
    yield found


def require() -> None:
    """Raises NotAvailable, with what to install, if a cluster cannot be made on this machine."""
    if os.geteuid() != 0:
        raise NotAvailable("no KUBECONFIG, and only root can make a cluster on this machine")
    missing = {package for program, package in NEEDS.items() if shutil.which(program) is None}
    if not (PLUGINS / "bridge").exists():
        missing.add("containernetworking-plugins")
    if missing:
        raise NotAvailable(
            f"no KUBECONFIG, and a cluster on this machine needs: apt-get install {' '.join(sorted(missing))}"
        )


@contextmanager
def own(docker: Docker, scratch: Path, keep: bool) -> Iterator[Cluster]:
    """Yields a cluster of one node, whose data is in `scratch`; gone afterwards, unless `keep`."""
    require()
    programs = parts.built(parts_folder())
    made = Cluster(
        str(programs / "kubectl"),
        str(scratch / "admin.kubeconfig"),
        ["ctr", "-a", str(scratch / "containerd.sock"), "-n", "k8s.io", "images", "import", "-"],
        scratch / "images.json",
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
            say(f"the cluster stays: export KUBECONFIG={made.kubeconfig}; its end: make test-k8s ARGS=--down")
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
    """Starts every process of the cluster in its network namespace."""
    began = time.monotonic()
    _network()
    _files(scratch)
    machine = {str(path): path.read_text() for path in MACHINE}
    (scratch / "machine.json").write_text(json.dumps({"settings": machine, "networks": _networks()}))
    _start(scratch, "containerd", ["containerd", "--config", str(scratch / "containerd.toml")])
    etcd = ["--data-dir", str(scratch / "etcd"), "--unsafe-no-fsync", "--log-level", "warn"]
    etcd += ["--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379"]
    _start(scratch, "etcd", [str(programs / "etcd"), *etcd, "--listen-peer-urls", "http://127.0.0.1:2380"])
    api = {
        "etcd-servers": "http://127.0.0.1:2379",
        "bind-address": "0.0.0.0",
        "advertise-address": NODE,
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
    _start(scratch, "kube-apiserver", [str(programs / "kube-apiserver"), *_options(api)])
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
    _start(scratch, "kube-controller-manager", [str(programs / "kube-controller-manager"), *_options(manager)])
    scheduler = {
        "kubeconfig": str(scratch / "kube-scheduler.kubeconfig"),
        "bind-address": "127.0.0.1",
        "cert-dir": str(scratch / "scheduler"),
        "leader-elect": "false",
    }
    _start(scratch, "kube-scheduler", [str(programs / "kube-scheduler"), *_options(scheduler)])
    kubelet = {
        "config": str(scratch / "kubelet.yaml"),
        "kubeconfig": str(scratch / "node.kubeconfig"),
        "hostname-override": "node1",
        "node-ip": NODE,
        "root-dir": str(scratch / "kubelet"),
        "cert-dir": str(scratch / "kubelet-certificates"),
    }
    _start(scratch, "kubelet", [str(programs / "kubelet"), *_options(kubelet)])
    proxy = {
        "kubeconfig": str(scratch / "admin.kubeconfig"),
        "hostname-override": "node1",
        "proxy-mode": "iptables",
        "cluster-cidr": POD_NET,
        "conntrack-max-per-core": "0",
        "conntrack-tcp-timeout-established": "0",
        "conntrack-tcp-timeout-close-wait": "0",
        "bind-address": "127.0.0.1",
    }
    _start(scratch, "kube-proxy", [str(programs / "kube-proxy"), *_options(proxy)])
    _start(scratch, "coredns", [str(programs / "coredns"), "-conf", str(scratch / "Corefile")])
    _wait(scratch, "kubelet", 120, lambda: "True" in made.kubectl(
        "get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}", check=False
    ))  # fmt: skip
    made.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(_storage(scratch)))
    say(f"the cluster is ready after {time.monotonic() - began:.0f} s")


def _options(values: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def _start(scratch: Path, name: str, command: Sequence[str]) -> None:
    with (scratch / f"{name}.log").open("ab") as log:
        # `ip netns exec` would hide the control groups.
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{NETNS}", *command], stdout=log, stderr=log, start_new_session=True
        )
    with (scratch / "processes").open("a") as file:
        file.write(f"{process.pid} {command[0]}\n")


def _wait(scratch: Path, name: str, seconds: float, check: Any) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise NotAvailable(f"{name} is not ready within {seconds:g} s: see {scratch}/{name}.log")
        time.sleep(0.5)


def _network() -> None:
    """Makes the namespace, joined to the machine's network, from which pods reach the outside."""
    commands = f"""
        ip netns add {NETNS}
        ip link add {NEAR} type veth peer name {FAR}
        ip link set {FAR} netns {NETNS}
        ip addr add {HOST}/24 dev {NEAR}
        ip link set {NEAR} up
        ip -n {NETNS} addr add {NODE}/24 dev {FAR}
        ip -n {NETNS} link set lo up
        ip -n {NETNS} link set {FAR} up
        ip -n {NETNS} route add default via {HOST}
        sysctl -q -w net.ipv4.ip_forward=1
    """
    for line in filter(None, map(str.strip, commands.splitlines())):
        subprocess.run(line.split(), check=True)
    for rule in _rules():
        subprocess.run(["iptables", *rule("-I")], check=True)


def _rules() -> list[Any]:
    return [
        lambda how: [how, "FORWARD", "-i", NEAR, "-j", "ACCEPT"],
        lambda how: [how, "FORWARD", "-o", NEAR, "-j", "ACCEPT"],
        lambda how: ["-t", "nat", how, "POSTROUTING", "-s", NODE_NET, "!", "-o", NEAR, "-j", "MASQUERADE"],
    ]


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
    socket = f"unix://{scratch}/containerd.sock"
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "failCgroupV1": False,
        "clusterDomain": "cluster.local",
        "clusterDNS": [NODE],
        "resolvConf": "",
        "containerRuntimeEndpoint": socket,
        "imageServiceEndpoint": socket,
        "podLogsDir": str(scratch / "pods"),
        "volumePluginDir": str(scratch / "plugins"),
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "50Mi"},
        "enforceNodeAllocatable": [],
        "imageGCHighThresholdPercent": 100,  # removed images could not be pulled again
        "nodeStatusUpdateFrequency": "2s",
    }
    (scratch / "kubelet.yaml").write_text(yaml.safe_dump(kubelet))
    (scratch / "containerd.toml").write_text(CONTAINERD.format(scratch=scratch, pause=PAUSE, plugins=PLUGINS))
    (scratch / "cni").mkdir(exist_ok=True)
    (scratch / "cni" / "10-bridge.conflist").write_text(json.dumps(_pod_network(scratch)))
    (scratch / "Corefile").write_text(
        f"cluster.local:53 {{\n bind {NODE}\n errors\n kubernetes cluster.local {{\n"
        f"  kubeconfig {scratch}/admin.kubeconfig\n  pods insecure\n }}\n}}\n"
        f".:53 {{\n bind {NODE}\n errors\n forward . /etc/resolv.conf\n}}\n"
    )


def _pod_network(scratch: Path) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "dataDir": str(scratch / "addresses"),
        "ranges": [[{"subnet": POD_NET}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True, "hairpinMode": True}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge | {"ipam": addresses}]}


def _storage(scratch: Path, volumes: int = 6) -> Iterator[dict[str, Any]]:
    """Yields a default storage class, and folders as its volumes."""
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    yield {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "folders", "annotations": default},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["node1"]}
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
    """Gives the node the image of a pod's sandbox."""
    context = scratch / "pause"
    context.mkdir(exist_ok=True)
    shutil.copy(programs / "pause", context / "pause")
    (context / "Dockerfile").write_text('FROM scratch\nCOPY pause /pause\nUSER 65534\nENTRYPOINT ["/pause"]\n')
    build(docker, context, PAUSE)
    made.load(docker, [PAUSE])


def down(scratch: Path) -> None:
    """Ends every process and container of a cluster, and removes its data. The images of its node go with it."""
    listed = scratch / "processes"
    lines = listed.read_text().splitlines() if listed.exists() else []
    started = [(int(pid), Path(program).name) for pid, program in (line.split(" ", 1) for line in lines)]
    running = [(pid, name) for pid, name in started if _runs(pid, name)]
    for pid, name in running:
        if name != "containerd":
            _end(pid, name)
    container = ("ctr", "-a", str(scratch / "containerd.sock"), "-n", "k8s.io", "tasks")
    for pid, name in running:
        if name == "containerd":
            tasks = subprocess.run([*container, "ls", "-q"], capture_output=True, text=True, check=False)
            for task in tasks.stdout.split():
                subprocess.run([*container, "delete", "--force", task], capture_output=True, check=False)
            _end(pid, name)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed([each for each in mounts if each.startswith(f"{scratch}/")]):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
    if (scratch / "machine.json").exists():
        before = json.loads((scratch / "machine.json").read_text())
        for path, value in before["settings"].items():
            Path(path).write_text(value)
        for name in set(_networks()) - {*before["networks"]}:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    if Path(f"/run/netns/{NETNS}").exists():
        for rule in _rules():
            subprocess.run(["iptables", *rule("-D")], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", NETNS], check=True)
    if scratch.exists():
        shutil.rmtree(scratch)


def _runs(pid: int, name: str) -> bool:
    with suppress(OSError):
        return name in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def _end(pid: int, name: str) -> None:
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if not _runs(pid, name):
                return
            time.sleep(0.1)


def _networks() -> list[str]:
    """Returns the network namespaces of pods."""
    return sorted(path.name for path in Path("/run/netns").glob("cni-*"))


CONTAINERD = """\
version = 2
root = "{scratch}/containerd/root"
state = "{scratch}/containerd/state"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", \
"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{scratch}/containerd.sock"
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
    conf_dir = "{scratch}/cni"
"""
