"""A tiny random Llama for the whole session, to run the real loop with a small model."""

from pathlib import Path

import pytest

from tests.support.inference_lab import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a 2-layer Llama with a tokenizer of 320 tokens."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny-llama")
