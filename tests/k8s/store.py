"""An object store in the cluster: a pod with a server of S3 (`s3_server.py`), its Service, a bucket, outages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from tests.docker import local_images
from tests.docker.engine import Docker, build, wait_for
from tests.docker.images import STOCK
from tests.k8s import s3_server
from tests.k8s.cluster import Cluster
from tests.support import ROOT

IMAGE = "tentalis-test/object-store:test"
NAME, BUCKET, SECRET = "object-store", "checkpoints", "object-store-keys"
URL, ENDPOINT = f"s3://{BUCKET}/tentalis", f"http://{NAME}:{s3_server.PORT}"
KEYS = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret"}
DOCKERFILE = """
FROM {base}
COPY constraints.txt /
RUN python -m venv /opt/moto \\
    && /opt/moto/bin/pip install --no-cache-dir -c /constraints.txt "moto[s3]" flask flask-cors
COPY s3_server.py /
ENV S3_IGNORE_SUBDOMAIN_BUCKETS=true HOME=/tmp
USER 10001:10001
CMD ["/opt/moto/bin/python", "/s3_server.py"]
"""
CLIENT = f"""
import boto3, json, sys
s3 = boto3.client("s3", endpoint_url="http://127.0.0.1:{s3_server.PORT}", region_name="us-east-1",
                  aws_access_key_id="a-key", aws_secret_access_key="a-secret")
if sys.argv[1] == "make":
    s3.create_bucket(Bucket="{BUCKET}")
pages = s3.get_paginator("list_objects_v2").paginate(Bucket="{BUCKET}")
print(json.dumps([each["Key"] for page in pages for each in page.get("Contents", ())]))
"""


def build_image(docker: Docker, scratch: Path, base: str) -> str:
    """Builds the image of the server, with the versions of the lock file; returns its name."""
    context = scratch / "object-store"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    pinned = re.findall(r"^[A-Za-z0-9._-]+==[^ \n]+", (ROOT / "requirements.lock").read_text("utf-8"), re.MULTILINE)
    (context / "constraints.txt").write_text("\n".join(pinned) + "\n", encoding="utf-8")
    shutil.copy(Path(s3_server.__file__), context / "s3_server.py")
    (context / "Dockerfile").write_text(DOCKERFILE.format(base=base), encoding="utf-8")
    build(docker, context, IMAGE)
    return IMAGE


def base_image(bases: str) -> str:
    """Returns the image with Python that the product's images are built on too. `bases`: as a report names them."""
    return local_images.PYTHON if bases.startswith("made here") else STOCK["BUILD_IMAGE"]


class StorePod:
    """The pod of the store, in one namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    def begin(self) -> None:
        """Starts the pod and makes the bucket, the Service and the Secret with the keys."""
        self._cluster.kubectl("apply", "-n", self._namespace, "-f", "-", given=yaml.safe_dump_all(_manifests()))
        self._cluster.kubectl(
            "wait", "-n", self._namespace, f"pod/{NAME}", "--for=condition=Ready", "--timeout=300s", timeout=310
        )
        self._inside("/opt/moto/bin/python", "-c", CLIENT, "make")

    def objects(self) -> list[str]:
        """Returns the keys of its objects."""
        found: list[str] = json.loads(self._inside("/opt/moto/bin/python", "-c", CLIENT, "list"))
        return found

    def answered(self, status: int, client: str = "") -> int:
        """Returns how many requests it has answered with a status, of one client's address or of all."""
        lines = self._cluster.kubectl("logs", "-n", self._namespace, NAME).splitlines()
        return sum(line.endswith(f" {status}") and line.startswith(f"{client} " if client else "") for line in lines)

    def refuse(self) -> None:
        """Lets it answer 503 to every request."""
        self._inside("touch", str(s3_server.AWAY))

    def vanish(self) -> None:
        """Takes the pod out of its Service: no connection is made."""
        self._select("nothing")

    def come_back(self) -> None:
        """Ends the outage, of either kind."""
        self._inside("rm", "-f", str(s3_server.AWAY))
        self._select(NAME)

    def _select(self, label: str) -> None:
        patch = json.dumps({"spec": {"selector": {"app": label}}})
        self._cluster.kubectl("patch", "service", NAME, "-n", self._namespace, "--type=merge", "-p", patch)

        def selected() -> bool:
            slices = self._cluster.get(
                "endpointslices", "-n", self._namespace, "-l", f"kubernetes.io/service-name={NAME}"
            )
            return any(each.get("endpoints") for each in slices) == (label == NAME)

        wait_for("the Service of the object store follows", 60, selected, every=1.0)

    def _inside(self, *command: str) -> str:
        return self._cluster.kubectl("exec", "-n", self._namespace, NAME, "--", *command)


def _manifests() -> list[dict[str, Any]]:
    named = {"name": NAME, "labels": {"app": NAME}}
    port = s3_server.PORT
    container = {
        "name": "s3",
        "image": f"docker.io/{IMAGE}",
        "imagePullPolicy": "IfNotPresent",
        "ports": [{"containerPort": port}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2},
    }
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": {"containers": [container]}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME},
            "spec": {"selector": {"app": NAME}, "ports": [{"port": port, "targetPort": port}]},
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": KEYS},
    ]
