"""`python -m trainer`: a user's mistake ends it with one line and its exit code, its own fault with a traceback."""

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

import trainer.__main__ as rank
from tentalis.inference.model_download import ModelNotFound
from tentalis.kafka import preflight
from tentalis.service.exit_codes import ExitCode
from tests.support.trainer_lab import config, tiny_model
from trainer.config.trainer_config import ConfigError, TrainerConfig, config_text
from trainer.data.fetch import BadRollouts
from trainer.model.model import BadAdapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def started(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **variables: str
) -> tuple[int, str]:
    """Starts a trainer with a configuration; returns its exit code and its last line."""
    file = folder / "run.yaml"
    file.write_text(text)
    for name, value in {"TENTALIS_BOOTSTRAP": "127.0.0.1:9", "TENTALIS_HOME": str(folder), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["trainer", "train", "--config", str(file), "--until-caught-up"])
    code = rank.main()
    return code, capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("as_rank", [False, True])
@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"base_model": "/nowhere/model"}, ExitCode.ERROR, "'/nowhere/model' is neither a folder, nor a GGUF file"),
        ({"lora": {"targets": ["no_such_module"]}}, ExitCode.PERMANENT, "no_such_module"),
        ({"device": "cuda"}, ExitCode.PERMANENT, "cuda"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line(
    changes: dict[str, Any],
    code: int,
    message: str,
    as_rank: bool,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_rank = {"RANK": "0", "WORLD_SIZE": "1"} if as_rank else {}
    monkeypatch.setattr("trainer.run.launch.connect_as", lambda settings, role: None)
    wrong = TrainerConfig.model_validate(config(model).model_dump() | changes)
    found, line = started(config_text(wrong), tmp_path, monkeypatch, capsys, **of_rank)
    assert (found, line[:7]) == (code, "error: ") and message in line


@pytest.mark.parametrize("ways", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["launcher", "rank"])
def test_a_broker_that_does_not_answer_is_one_line_before_the_model_is_loaded(
    ways: dict[str, str],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preflight.connect, "__defaults__", (0.3,))
    text = config_text(TrainerConfig.model_validate(config(model).model_dump() | {"base_model": "/nowhere/model"}))
    code, line = started(text, tmp_path, monkeypatch, capsys, **ways)
    assert code == ExitCode.UNREACHABLE
    assert line.startswith("error: no Kafka answers on 127.0.0.1:9 within 0.3 s")


def test_a_file_that_is_no_configuration_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started("steps: many", tmp_path, monkeypatch, capsys)[0] == ExitCode.USAGE
    code, line = started("run_id: r", tmp_path, monkeypatch, capsys)
    assert code == ExitCode.USAGE and "base_model: Field required" in line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("why"), ExitCode.USAGE),
        (ModelNotFound("why"), ExitCode.ERROR),
        (BadAdapter("why"), ExitCode.PERMANENT),
        (BadRollouts([]), ExitCode.ERROR),
        (KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN)), ExitCode.UNREACHABLE),
        (PermissionError(13, "Permission denied", "/checkpoints"), ExitCode.ERROR),
    ],
)
def test_what_users_cause_is_one_line_and_has_an_exit_code(
    error: Exception,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(rank, "launch", fail)
    found, line = started("", tmp_path, monkeypatch, capsys)
    assert (found, line[:7]) == (code, "error: ")


def test_a_fault_of_the_trainer_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("a bug")

    monkeypatch.setattr(rank, "launch", fail)
    with pytest.raises(AssertionError, match="a bug"):
        started("", tmp_path, monkeypatch, capsys)
