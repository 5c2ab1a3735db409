"""The Dockerfile and the lists of its packages: they agree with the lock, and with what is installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tentalis.service.packages import normal
from tests.docker import images, sandbox_episode
from tests.support import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
STORES = ("gs", "s3")
EVERYWHERE = ("environments", "math", *STORES)
LISTS = {
    "core": EVERYWHERE,
    "gui": ("gui", *EVERYWHERE),
    "model": ("serve", *EVERYWHERE),
    "trainer": ("train", *EVERYWHERE),
}


def listed(name: str) -> list[Requirement]:
    text = (ROOT / "deploy" / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    return [Requirement(line) for line in text.splitlines()]


def locked() -> set[tuple[str, str]]:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return {(name, version) for name, version in re.findall(r"^([\w.-]+)==([^ ;\\\s]+)", lock, re.MULTILINE)}


@pytest.mark.parametrize("name", [*LISTS, "build"])
def test_a_list_names_versions_of_the_lock(name: str) -> None:
    found = {(each.name, str(each.specifier).removeprefix("==")) for each in listed(name)}
    assert found and found - locked() == set(), "`make lock` writes the lists"


def closure(lines: list[str]) -> set[str]:
    """The packages that an installation of these requirements has here, by the metadata of what is installed."""
    found: dict[str, set[str]] = {}
    waiting = [Requirement(line) for line in lines]
    while waiting:
        wanted = waiting.pop()
        name, extras = normal(wanted.name), {"", *wanted.extras}
        new = extras - found.get(name, set())
        found.setdefault(name, set()).update(extras)
        for extra in new:
            environment = default_environment() | {"extra": extra}
            for line in requires(name) or ():
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate(environment):
                    waiting.append(inner)
    return set(found)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_complete(name: str) -> None:
    extras = [line for extra in LISTS[name] for line in TABLE["optional-dependencies"][extra]]
    here = {normal(each.name) for each in listed(name) if each.marker is None or each.marker.evaluate()}
    assert here == closure([*TABLE["dependencies"], *extras]), "`make lock` writes the lists"


def test_torch_is_only_where_it_is_used() -> None:
    def names(name: str) -> set[str]:
        return {each.name for each in listed(name)}

    assert not any(each in ("torch", "triton", "transformers") or each.startswith("nvidia-") for each in names("gui"))
    assert names("core") < names("model") < names("trainer") and names("core") < names("gui")
    assert {"torch", "gguf", "accelerate"} <= names("model") and "deepspeed" in names("trainer") - names("model")


def test_the_images_that_there_are() -> None:
    parents = {stage: base for base, stage in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)}
    for image in ("core", "worker-gui", "model", "trainer-cpu", "trainer-gpu", "sandbox"):
        lineage = [image]
        while lineage[-1] in parents:
            lineage.append(parents[lineage[-1]])
        assert "base" in lineage, "its user is not root"
        assert ("runtime" in lineage) == (image != "sandbox"), "its entry point is tentalis"
        assert not {"tools", "packages-core"} & set(lineage), "it has no compiler"
    base = DOCKERFILE.partition(" AS base\n")[2].partition("\nFROM ")[0]
    assert "USER 10001:10001" in base and "WORKDIR /var/lib/tentalis" in base
    assert '\nENTRYPOINT ["tentalis"]\n' in DOCKERFILE.partition(" AS runtime\n")[2].partition("\nFROM ")[0]


def test_git_is_where_swe_is_played_alone() -> None:
    stages = {part.partition("\n")[0]: part for part in DOCKERFILE.split(" AS ")[1:]}
    assert [name for name, text in stages.items() if re.search(r"apt-get install .*\bgit\b", text)] == ["runtime-core"]
    assert "\nUSER 10001:10001\n" in stages["runtime-core"].rpartition("apt-get")[2]
    assert re.findall(r"FROM runtime-core AS (\S+)", DOCKERFILE) == ["core", "worker-gui"]


@pytest.mark.parametrize("image", ["core", "worker-gui", "model", "trainer-cpu", "trainer-gpu"])
def test_each_image_has_its_bill_of_materials_and_the_code_in_its_last_layers(image: str) -> None:
    stage = DOCKERFILE.partition(f" AS {image}\n")[2].partition("\nFROM ")[0]
    assert "/usr/share/doc/tentalis/sbom.cdx.json" in stage
    copies = re.findall(r"^COPY .*$", stage, re.MULTILINE)
    assert copies[-1] == "COPY --from=app /opt/app /opt/tentalis"


def test_all_that_is_copied_exists_and_reaches_the_builder() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    assert rules[0] == "*"
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert {"requirements.lock", "deploy/requirements/core.txt", "tentalis", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, rule) or source.startswith(f"{rule}/") for rule in allowed), source
    packages = {pattern.removesuffix("*") for pattern in ("schemas*", "streams*", "trainer*", "tentalis*")}
    assert packages <= set(sources)


def test_versions_are_those_of_the_project() -> None:
    assert f"ARG VERSION={TABLE['version']}\n" in DOCKERFILE
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    uv = re.search(r"^UV_VERSION := (\S+)$", makefile, re.MULTILINE)
    assert uv is not None and f"ARG UV_VERSION={uv[1]}\n" in DOCKERFILE
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"\$\{TENTALIS_VERSION:-([^}]+)\}", compose)) == {TABLE["version"]}


def test_the_labels_are_those_of_the_project() -> None:
    base = DOCKERFILE.partition(" AS base\n")[2].partition("\nFROM ")[0]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', base))
    chart = yaml.safe_load((ROOT / "helm" / "tentalis" / "Chart.yaml").read_text("utf-8"))
    assert labels.pop("title") == "Tentalis" == labels.pop("vendor")
    assert labels == {
        "description": TABLE["description"],
        "licenses": TABLE["license"],
        "source": chart["home"],
        "version": "${VERSION}",
        "revision": "${REVISION}",
    }


@pytest.mark.long
def test_the_wheel_has_the_same_bytes_in_every_build(tmp_path: Path) -> None:
    assert "ARG SOURCE_DATE_EPOCH" in DOCKERFILE.partition(" AS app\n")[2].partition("FROM")[0]
    built = []
    for time in (1_600_000_000, 1_700_000_000):
        folder = tmp_path / str(time)
        for name in ("schemas", "streams", "tentalis", "trainer"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        for path in folder.rglob("*"):
            os.utime(path, (time, time))
        uv = [str(Path(sys.executable).with_name("uv")), "build", "--wheel", "--no-build-isolation"]
        command = [*uv, "--python", sys.executable, "--out-dir", str(folder / "dist"), str(folder)]
        environment = os.environ | {"SOURCE_DATE_EPOCH": "1650000000"}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        (wheel,) = (folder / "dist").glob("*.whl")
        built.append(wheel.read_bytes())
    assert built[0] == built[1]


def test_the_docker_test_builds_every_target_and_runs_code_in_the_sandbox_as_the_page_shows() -> None:
    named = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text("utf-8"), re.MULTILINE))
    steps = {each for each in named if each.startswith(("packages-", "runtime"))} | {"tools", "app", "base"}
    assert {*images.ALL_TARGETS} == named - steps
    page = (ROOT / "docs" / "operations" / "install.md").read_text("utf-8")
    assert f"docker {' '.join(sandbox_episode.RUN)} registry.example/sandbox:0.1.0 - < answer.py" in page
