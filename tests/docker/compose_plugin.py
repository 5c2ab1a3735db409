"""Docker Compose 2, built from its Go module where the machine has none: Debian's package is Compose 1."""

from __future__ import annotations

from pathlib import Path

from tests.docker.engine import say
from tests.docker.go_modules import build_program, require_go, write_module

COMPOSE, VERSION = "github.com/docker/compose/v2", "v2.39.4"


def built(cache: Path) -> Path:
    """Returns a folder for DOCKER_CONFIG that has the plugin. Raises NotAvailable without Go."""
    config = cache / f"docker-compose-{VERSION}"
    plugin = config / "cli-plugins" / "docker-compose"
    if not plugin.exists():
        require_go("to build Docker Compose, or install Compose 2.20 or newer (the package docker-compose-plugin)")
        say("building Docker Compose from its Go modules: 2 to 5 minutes on two cores, once")
        module = write_module(config / "module", {COMPOSE: VERSION})
        build_program(module, f"{COMPOSE}/cmd", plugin, f"-X {COMPOSE}/internal.Version={VERSION}")
    return config
