"""Stdout is for data: nothing that a library prints is on it, however it prints."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.inference_lab import make_model

NOISY = ROOT / "tests" / "support" / "noisy"


def run(*arguments: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """A command on a machine with noisy libraries, to its end."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TENTALIS_")}
    env |= {"TENTALIS_HOME": str(home), "PYTHONPATH": f"{ROOT}:{NOISY}"}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_what_libraries_print_goes_to_stderr_and_the_data_to_stdout(tmp_path: Path) -> None:
    done = run("-m", "tentalis.cli", "doctor", "-o", "json", home=tmp_path)
    assert {finding["check"] for finding in json.loads(done.stdout)} >= {"python", "gpu"}
    said = [line for line in done.stderr.splitlines() if "noise" in line]
    assert len(said) == 6, "each way to print was tried"


def test_no_command_prints_past_the_stream_for_data() -> None:
    past = []
    for path in sorted((ROOT / "tentalis" / "cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            direct = isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.stdout"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo"):
                direct = not {"file", "err"} & {keyword.arg for keyword in node.keywords}
            if direct:
                past.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert past == [], "use tentalis.cli.shared.output"


@pytest.mark.parametrize("arguments", [("--help",), ("replay", "--help"), ("--version",), ("version", "-o", "json")])
def test_help_and_versions_are_on_stdout(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run("-m", "tentalis.cli", *arguments, home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "entalis" in done.stdout


def test_a_reader_that_leaves_early_ends_the_command_quietly(tmp_path: Path) -> None:
    env = os.environ | {"TENTALIS_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m tentalis.cli train --print-config | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")


LOADING = """
import sys
from pathlib import Path
model, folder = Path(sys.argv[1]), Path(sys.argv[2])

from tentalis.inference.gguf_model import convert_gguf
from tests.support.tiny_gguf import tiny_gguf
convert_gguf(tiny_gguf(folder / "tiny.gguf"), folder / "model", "tiny", "tiny", lambda *progress: None)

import torch
from tentalis.inference.runtime import ModelRuntime
ModelRuntime(model, torch.device("cpu"), torch.float32)

from tests.support.trainer_lab import config
from trainer.distributed import ranks
from trainer.step.engine import TrainingEngine
TrainingEngine(config(model), model, ranks.join_ranks(), "cpu")
"""


def test_a_first_start_a_model_server_and_a_trainer_load_their_libraries_without_a_word(tmp_path: Path) -> None:
    model = make_model(tmp_path / "made" / "tiny")
    done = run("-c", LOADING, str(model), str(tmp_path), home=tmp_path)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line and "noise" not in line]
    assert (done.returncode, said) == (0, [])
