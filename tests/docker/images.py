"""The product's images, built for a test."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.docker import local_images
from tests.docker.engine import Docker, build, pullable, say
from tests.support import ROOT

STOCK = {"BUILD_IMAGE": "python:3.11", "RUNTIME_IMAGE": "python:3.11-slim"}
STOCK_KAFKA = "apache/kafka:4.1.0"
TARGETS = ("core", "model", "trainer-cpu")
"""The images of a stack on CPUs."""
ALL_TARGETS = (*TARGETS, "trainer-gpu", "sandbox", "worker-gui")


@dataclass
class BuiltImages:
    """The bases of the images, and the seconds and megabytes of each."""

    bases: str = ""
    built_s: dict[str, float] = field(default_factory=dict)
    image_mb: dict[str, int] = field(default_factory=dict)


def tag_of(target: str) -> str:
    """Returns the name of the image of a build target."""
    return f"tentalis-test/{target}:test"


def build_images(docker: Docker, scratch: Path, targets: tuple[str, ...], built: BuiltImages) -> str:
    """Builds the images, on the stock bases where the engine can pull them; returns the name of the Kafka image."""
    args, kafka = dict(STOCK), STOCK_KAFKA
    if all(pullable(docker, image) for image in (*STOCK.values(), STOCK_KAFKA)):
        built.bases = ", ".join([*STOCK.values(), STOCK_KAFKA])
    else:
        say("the engine cannot pull the stock images: making bases of Debian packages and of the embedded Kafka")
        args = dict.fromkeys(STOCK, local_images.python_image(docker, scratch))
        kafka = local_images.kafka_image(docker, scratch)
        built.bases = "made here: Debian 12 with Python 3.11; the archives of the embedded Kafka"
    if "TORCH_CPU_INDEX" in os.environ:
        args["TORCH_CPU_INDEX"] = os.environ["TORCH_CPU_INDEX"]
    for target in targets:
        say(f"building {target}")
        tag = tag_of(target)
        built.built_s[target] = round(build(docker, ROOT, tag, target=target, args=args), 1)
        built.image_mb[target] = int(docker("image", "inspect", "--format", "{{.Size}}", tag)) // 10**6
    return kafka
