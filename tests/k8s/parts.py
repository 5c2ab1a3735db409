"""The programs of a small Kubernetes, built from their Go modules: nothing else has to be downloaded.

The Go tool checks every module against its checksum database. A cold build takes 8 to 15 minutes on two cores.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.docker.engine import say
from tests.docker.go_modules import build_program, go, require_go, write_module

KUBERNETES, ETCD, COREDNS, KUBE_ROUTER = "v1.34.4", "v3.6.4", "v1.12.4", "v2.1.0"
PROGRAMS = {
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "etcd": "go.etcd.io/etcd/server/v3",
}
# Enforces network policies. A module of its own: it needs other versions of Kubernetes' libraries.
FIREWALL = "github.com/cloudnativelabs/kube-router/v2"
# One module for the two programs that are ours: a name server with the plugins of a small cluster, and the process that
# holds the namespaces of a pod.
DNS = """\
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func init() { dnsserver.Directives = []string{"bind", "errors", "kubernetes", "forward"} }

func main() { coremain.Run() }
"""
PAUSE = """\
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
"""


def built(folder: Path) -> Path:
    """Builds the programs that are missing in `folder`; returns their folder. Raises NotAvailable."""
    programs = folder / "bin"
    wanted = [programs / name for name in (*PROGRAMS, "coredns", "pause", "kube-router")]
    if all(path.exists() for path in wanted):
        return programs
    require_go("to build a Kubernetes, or name a cluster with KUBECONFIG")
    programs.mkdir(parents=True, exist_ok=True)
    say("building Kubernetes from its Go modules: 8 to 15 minutes on two cores, once")
    kubernetes = _module(folder / "kubernetes", {"k8s.io/kubernetes": KUBERNETES, "go.etcd.io/etcd/server/v3": ETCD})
    for name, package in PROGRAMS.items():
        _build(kubernetes, package, programs / name, _versions())
    dns = _module(folder / "dns", {"github.com/coredns/coredns": COREDNS})
    (dns / "main.go").write_text(DNS, encoding="utf-8")
    _build(dns, ".", programs / "coredns")
    firewall = write_module(folder / "kube-router", {FIREWALL: KUBE_ROUTER})
    _build(firewall, f"{FIREWALL}/cmd/kube-router", programs / "kube-router")
    pause = write_module(folder / "pause", {})
    (pause / "main.go").write_text(PAUSE, encoding="utf-8")
    _build(pause, ".", programs / "pause")
    return programs


def _module(folder: Path, required: dict[str, str]) -> Path:
    """Writes a module that requires others. The libraries that Kubernetes keeps in its own repository are replaced by
    their releases, which have its version with a 0 in front."""
    write_module(folder, required)
    release = f"v0.{KUBERNETES.removeprefix('v1.')}"
    downloaded = json.loads(go(folder, "mod", "download", "-json", f"k8s.io/kubernetes@{KUBERNETES}"))
    staged = json.loads(go(folder, "mod", "edit", "-json", downloaded["GoMod"]))["Replace"]
    names = sorted(each["Old"]["Path"] for each in staged if each["New"]["Path"].startswith("./"))
    go(folder, "mod", "edit", *(f"-replace={name}={name}@{release}" for name in names))
    return folder


def _versions() -> str:
    """The linker's flags that give the programs their version."""
    _, minor, _ = KUBERNETES.split(".")
    values = {"gitVersion": KUBERNETES, "gitMajor": "1", "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in values.items())


def _build(module: Path, package: str, program: Path, flags: str = "") -> None:
    began = time.monotonic()
    if build_program(module, package, program, flags):
        say(f"built {program.name} in {time.monotonic() - began:.0f} s")
