"""The command that starts vLLM, its plugin, and the verdict on its log-probs."""

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.records import LogprobsMode
from tentalis.cli.shared.errors import explain
from tentalis.inference.logprobs_check import MENDING_FLAG, LogprobsMeasurement, judge_logprobs, settled
from tentalis.inference.vllm.command import (
    VllmMissing,
    VllmOptions,
    find_vllm,
    vllm_command,
    vllm_environment,
    write_plugin,
)
from tentalis.inference.vllm.plugin import skipping_bare_heads, skipping_base_rows
from tentalis.service.exit_codes import ExitCode

RAW, PROCESSED, UNKNOWN = LogprobsMode.RAW, LogprobsMode.PROCESSED, LogprobsMode.UNKNOWN


def test_the_command_has_what_training_needs() -> None:
    command = vllm_command(Path("/x/vllm"), VllmOptions(Path("/m"), "tiny", max_rank=20, extra=("--seed", "1")))
    line = " ".join(command)
    assert line.startswith("/x/vllm serve /m --served-model-name tiny ") and line.endswith(" --seed 1")
    for needed in (
        MENDING_FLAG,
        "--enable-lora",
        "--max-lora-rank 32",
        "--max-cpu-loras 16",
        "--generation-config vllm",
    ):
        assert f" {needed} " in line
    assert "--enforce-eager" in command
    assert "--enforce-eager" not in vllm_command(Path("vllm"), VllmOptions(Path("/m"), "tiny", gpu=True))


def test_vllm_is_found_by_name_then_in_the_cache_then_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(VllmMissing, match="`make vllm`") as error:
        find_vllm(None, tmp_path / "cache")
    assert explain(error.value)[1] == ExitCode.PERMANENT
    for folder in ("path", "cache/vllm/bin", "own"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "vllm").touch(mode=0o755)
        named = tmp_path / "own" / "vllm" if folder == "own" else None
        assert find_vllm(named, tmp_path / "cache") == tmp_path / folder / "vllm"
    with pytest.raises(VllmMissing, match="is not an executable file"):
        find_vllm(tmp_path / "none", tmp_path / "cache")


def test_vllm_finds_the_plugin_and_nothing_else_of_ours(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    environment = vllm_environment(VllmOptions(Path("/m"), "tiny"), tmp_path)
    assert environment["PYTHONPATH"] == str(tmp_path)
    [found] = [each for each in importlib.metadata.distributions(path=[str(tmp_path)])]
    [entry] = found.entry_points
    assert (entry.group, entry.value) == ("vllm.general_plugins", "tentalis_vllm:install")
    assert "import tentalis" not in (tmp_path / "tentalis_vllm.py").read_text()


def bgmv_expand(inputs: Any, weights: Any, output: Any, indices: Any, add_inputs: bool = True) -> None:
    """The operation of vLLM's CPU build: an index of -1 takes the last adapter."""
    output += torch.einsum("bi,boi->bo", inputs, weights[indices])


def test_the_plugin_leaves_the_rows_of_the_base_model_alone() -> None:
    torch.manual_seed(0)
    inputs, weights = torch.randn(4, 3), torch.randn(2, 5, 3)
    indices = torch.tensor([0, -1, 1, -1])
    wrong, right, expected = torch.ones(4, 5), torch.ones(4, 5), torch.ones(4, 5)
    bgmv_expand(inputs, weights, wrong, indices)
    skipping_base_rows(bgmv_expand)(inputs, weights, right, indices, add_inputs=True)
    for row, adapter in ((0, 0), (2, 1)):
        expected[row] += weights[adapter] @ inputs[row]
    assert torch.allclose(right, expected) and not torch.allclose(wrong, expected)


def test_the_plugin_leaves_out_a_head_that_no_adapter_changes() -> None:
    asked: list[int] = []
    corrected = skipping_bare_heads(lambda *arguments: asked.append(len(arguments)))
    corrected(None, torch.ones(22, 9), torch.ones(22, 3), torch.ones(2, 1, 4, 3), torch.zeros(2, 1, 9, 4), 1.0)
    assert not asked
    corrected(None, torch.ones(2, 9), torch.ones(2, 3), torch.ones(2, 1, 4, 3), torch.ones(2, 1, 9, 4), 1.0)
    assert asked == [6]


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ([-0.5, -0.6, -0.7], PROCESSED),
        ([-1.5, -2.6, -0.1], RAW),
        ([-0.5, -0.6, -9.0], PROCESSED),
        ([-3.0, -3.0, -3.0], UNKNOWN),
        ([], None),
    ],
)
def test_the_log_probs_decide_if_a_server_is_processed_raw_or_unknown(
    given: list[float], mode: LogprobsMode | None
) -> None:
    processed, raw = [-0.51, -0.6, -0.7][: len(given)], [-1.5, -2.6, -0.1][: len(given)]
    values = (np.array(each, dtype=np.float32) for each in (given, processed, raw))
    assert judge_logprobs(*values).mode is mode


def test_samples_that_do_not_tell_the_kinds_apart_decide_nothing() -> None:
    same = np.array([-0.01, -0.02], dtype=np.float32)
    assert judge_logprobs(same, same, same).mode is None


@pytest.mark.parametrize(
    ("declared", "measured", "recorded", "problem"),
    [
        (PROCESSED, PROCESSED, PROCESSED, ""),
        (RAW, PROCESSED, PROCESSED, ""),
        (UNKNOWN, PROCESSED, PROCESSED, ""),
        (PROCESSED, RAW, RAW, "is declared to give processed log-probs, but gives the log-probs of the bare model"),
        (RAW, RAW, RAW, "gives the log-probs of the bare model"),
        (PROCESSED, UNKNOWN, UNKNOWN, "not trained on"),
        (PROCESSED, None, PROCESSED, "cannot be checked"),
    ],
)
def test_a_measured_mode_takes_precedence_over_the_declared_one(
    declared: LogprobsMode, measured: LogprobsMode | None, recorded: LogprobsMode, problem: str
) -> None:
    mode, said = settled(declared, LogprobsMeasurement(measured, "numbers"))
    assert mode is recorded and problem in said and bool(said) == bool(problem)
    assert (MENDING_FLAG in said) == (measured in (RAW, UNKNOWN))
