"""A tiny random Llama for the whole session: the loop is real, the model is small."""

from pathlib import Path

import pytest

from tests.support.inference_lab import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a 2-layer Llama with a tokenizer of 320 tokens."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny-llama")
