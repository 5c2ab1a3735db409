"""The manifest names everything that changes the bytes of a step, and a replay names each difference."""

import json
import logging
import platform
from pathlib import Path

import pytest

from schemas.digest import record_digest
from schemas.records import RunManifest
from tentalis.inference.models import model_digest, tokenizer_digest
from tests.support import loop_records
from tests.support.trainer_lab import tiny_model
from trainer.distributed import runtime
from trainer.distributed.environment import CONFIG_FILE, SOURCE, VARIABLES, differences, environment, source_digest
from trainer.replay.recording import CannotReplay
from trainer.replay.replay import check_environment
from trainer.run.manifest import manifest_digest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def recorded(model: Path, found: dict[str, str]) -> RunManifest:
    here = {"base_sha256": model_digest(model), "versions": runtime.package_versions(), "environment": found}
    return loop_records.manifest().model_copy(update=here | {"instruction_set": runtime.instruction_set("cpu")})


def test_another_config_json_with_the_same_weights_is_refused(model: Path, tmp_path: Path) -> None:
    """rope_theta changes every position, and neither digest of the files saw it."""
    manifest = recorded(model, environment(model, "cpu"))
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    settings = json.loads((other / CONFIG_FILE).read_text())
    (other / CONFIG_FILE).write_text(json.dumps(settings | {"transformers_version": "9.9"}))
    check_environment(manifest, other)
    (other / CONFIG_FILE).write_text(json.dumps(settings | {"rope_theta": 20_000.0}))
    assert (model_digest(other), tokenizer_digest(other)) == (model_digest(model), tokenizer_digest(model))
    with pytest.raises(CannotReplay, match=r"config\.json has other settings"):
        check_environment(manifest, other)


def test_another_source_processor_or_variable_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    manifest = recorded(model, environment(model, "cpu", {"MKL_CBWR": "AVX2", "HOME": "/root"}) | {SOURCE: "older"})
    assert "variable HOME" not in manifest.environment
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with caplog.at_level(logging.WARNING):
        check_environment(manifest, model)
    assert [record.getMessage() for record in caplog.records] == [
        f"source differs: the run had older, here it is {source_digest()}; the bytes may differ",
        "variable MKL_CBWR differs: the run had AVX2, here it is not set; the bytes may differ",
        "variable ONEDNN_MAX_CPU_ISA differs: the run had not set, here it is AVX2; the bytes may differ",
    ]


def test_a_replay_on_cuda_does_not_name_the_workspace_that_the_trainer_sets_itself(model: Path) -> None:
    """The run was recorded after its rank had set it, and a replay compares before."""
    name = "variable CUBLAS_WORKSPACE_CONFIG"
    trained = environment(model, "cuda", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert differences(trained, environment(model, "cuda", {})) == {}
    other = differences(trained, environment(model, "cuda", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}))
    assert other == {name: (":4096:8", ":16:8")}
    assert name not in environment(model, "cpu", {})


DRIVER = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
"""The file as the driver's kernel module writes it; the second line is the compiler of the kernel."""


def test_another_driver_of_the_gpu_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr("trainer.distributed.environment.DRIVER_VERSION", str(file))
    without = environment(model, "cuda", {})
    assert without["driver"] == "", "a device of CUDA without that file, as under WSL"
    file.write_text(DRIVER)
    trained = environment(model, "cuda", {})
    assert trained["driver"] == DRIVER.splitlines()[0]
    assert "driver" not in environment(model, "cpu", {})
    file.write_text(DRIVER.replace("gcc version 11.4.0", "gcc version 12.1.0"))
    assert differences(trained, environment(model, "cuda", {})) == {}
    newer = DRIVER.replace("535.104.05", "550.54.14")
    file.write_text(newer)
    assert differences(trained, environment(model, "cuda", {})) == {
        "driver": (DRIVER.splitlines()[0], newer.splitlines()[0])
    }


def test_another_python_is_named_and_one_that_was_not_recorded_is_not(model: Path) -> None:
    """Its sum() of floats is another from 3.12 on. Manifests did not always have it."""
    here = environment(model, "cpu", {})
    own = f"{platform.python_implementation()} {platform.python_version()}"
    assert differences(here | {"python": "CPython 3.10.1"}, here) == {"python": ("CPython 3.10.1", own)}
    earlier = {name: value for name, value in here.items() if name != "python"}
    assert differences(earlier, here | {"variable MKL_CBWR": "AVX2"}) == {"variable MKL_CBWR": ("not set", "AVX2")}


def test_a_manifest_of_an_earlier_release_keeps_its_digest_and_is_not_compared(model: Path) -> None:
    before = loop_records.manifest()
    assert before.environment == {} and differences({}, environment(model, "cpu")) == {}
    # The digest that the release without the field gave it.
    assert manifest_digest(before) == "1084ad3a77bfdcb18cf37eede5f7ddf79f5d6cdbe8b4afc0e0da30052df833cf"
    assert record_digest(before.model_copy(update={"environment": {"a": "b"}}), {"digest"}) != record_digest(
        before, {"digest"}
    )
