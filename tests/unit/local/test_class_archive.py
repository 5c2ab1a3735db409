"""The archive of the broker's classes is made once, and a broker starts without it."""

import fcntl
import os
from pathlib import Path

import pytest

from tentalis.local.class_archive import CLASSES, class_archive

MAKES = """#!/bin/sh
echo "$@" >>"${0%/*}/calls"
for word; do case $word in -XX:SharedArchiveFile=*) echo classes >"${word#*=}" ;; esac; done
"""
FAILS = "#!/bin/sh\necho 'no memory for the archive' >&2\nexit 1\n"


def runtime(folder: Path, program: str) -> Path:
    """A Java runtime whose program is this script."""
    (folder / "bin").mkdir(parents=True)
    (folder / "release").write_text('JAVA_VERSION="25"')
    java = folder / "bin" / "java"
    java.write_text(program)
    java.chmod(0o755)
    return java


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "kafka"
    folder.mkdir()
    made = [folder / "a.jar", folder / "b.jar"]
    for jar in made:
        jar.write_text("jar")
    return made


def test_it_is_made_once_for_a_runtime_its_options_and_its_archives(tmp_path: Path, jars: list[Path]) -> None:
    java = runtime(tmp_path / "java", MAKES)
    first = class_archive(java, jars, ["-Xmx1m"])
    assert first is not None and first.read_text() == "classes\n" and first == class_archive(java, jars, ["-Xmx1m"])
    (call,) = (java.parent / "calls").read_text().splitlines()
    assert call.startswith("-Xshare:dump ") and f"-XX:SharedClassListFile={CLASSES} " in call
    assert call.endswith(f"-cp {jars[0]}:{jars[1]}") and " -Xmx1m " in call
    others = {first, class_archive(java, jars, ["-Xmx2m"]), class_archive(java, jars[:1], ["-Xmx1m"])}
    os.utime(jars[0], (1, 1))  # the JVM would refuse the archive
    others.add(class_archive(java, jars, ["-Xmx1m"]))
    assert len(others) == 4 and None not in others
    assert not [each for each in jars[0].parent.iterdir() if each.is_dir()]


def test_a_broker_starts_without_an_archive_that_cannot_be_made(
    tmp_path: Path, jars: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert class_archive(runtime(tmp_path / "java", FAILS), jars, []) is None
    assert str(jars[0].parent) in caplog.text and "no memory for the archive" in caplog.text
    assert not list(jars[0].parent.glob("*.jsa"))
    caplog.clear()
    assert class_archive(tmp_path / "nowhere" / "bin" / "java", jars, []) is None and "nowhere" in caplog.text


def test_a_broker_does_not_wait_for_another_process_that_makes_it(tmp_path: Path, jars: list[Path]) -> None:
    java = runtime(tmp_path / "java", MAKES)
    made = class_archive(java, jars, [])
    assert made is not None
    made.unlink()
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert class_archive(java, jars, []) is None
    assert class_archive(java, jars, []) == made
