"""The small real model: prepared once, served, and in agreement with the trainer's arithmetic."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tentalis.inference.grammar import GrammarCompiler
from tentalis.inference.models import resolve_model
from tentalis.inference.response_format import answer_grammar
from tests.support.inference_lab import Lab, make_adapter

pytestmark = pytest.mark.model
TOLERANCE = 1e-4
QUESTIONS = [
    "What is the capital of France?",
    "Hi",
    "Explain in one short sentence why the sky is blue during the day and why it turns red in the evening.",
]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return resolve_model(None, Path(os.environ.get("TENTALIS_CACHE", "~/.cache/tentalis")))


@pytest.fixture(scope="module")
def lab(smollm2: Path) -> Iterator[Lab]:
    lab = Lab(smollm2)
    lab.engine.start()
    yield lab
    lab.engine.stop()


def rendered(lab: Lab, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return list(lab.runtime.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def test_sampled_and_scored_logprobs_equal_the_trainers(smollm2: Path, lab: Lab, tmp_path: Path) -> None:
    folder = make_adapter(smollm2, tmp_path / "adapter", seed=1, r=16, lora_alpha=8)
    adapter = lab.runtime.load_adapter("p@v1", folder)
    prompts = [rendered(lab, question) for question in QUESTIONS]
    samples = lab.generate(prompts, 8, [adapter] * 3, max_tokens=16, temperature=0.8, seed=1, ignore_eos=True)
    whole = [prompt + chunk.token_ids for prompt, chunks in zip(prompts, samples, strict=True) for chunk in chunks]
    scored = lab.score(whole, [adapter] * len(whole), temperature=0.8)
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    trained = PeftModel.from_pretrained(base, str(folder))
    for place, chunks in enumerate(samples):
        begin = len(prompts[place])
        ids = torch.tensor(whole[place * 8 : place * 8 + 8])
        with torch.no_grad():
            rows = (trained(input_ids=ids).logits / 0.8).log_softmax(-1)
        expected = rows[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
        sampled = np.array([chunk.logprobs for chunk in chunks])
        assert np.abs(expected[:, begin - 1 :] - sampled).max() < TOLERANCE
        found = np.stack([result.logprobs[1:] for result in scored[place * 8 : place * 8 + 8]])
        assert np.abs(expected - found).max() < TOLERANCE


def test_it_answers_and_ends_its_turn(lab: Lab) -> None:
    [[chunk]] = lab.generate([rendered(lab, QUESTIONS[0])], max_tokens=48, temperature=0)
    assert chunk.finish_reason == "stop"
    assert "Paris" in lab.runtime.tokenizer.decode(chunk.token_ids)
    assert chunk.token_ids[-1] == lab.runtime.tokenizer.eos_token_id == 2


PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "pattern": "^[A-Z][a-z]{2,20}$"},
        "population": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
        "languages": {"type": "array", "items": {"enum": ["French", "English", "other"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "country", "population", "languages"],
    "additionalProperties": False,
}


def test_sampled_answers_are_valid_against_a_schema(lab: Lab) -> None:
    source = answer_grammar({"type": "json_schema", "json_schema": {"schema": PLACE}})
    assert source is not None
    runtime = lab.runtime
    made = GrammarCompiler(runtime.tokenizer, runtime.vocab_size, runtime.eos_token_ids)
    grammar = asyncio.run(made.compile(source))
    prompt = rendered(lab, "Tell me about Paris as JSON.")
    [chunks] = lab.generate([prompt], 20, max_tokens=300, seed=1, grammar=grammar)
    for chunk in chunks:
        assert chunk.finish_reason == "stop" and chunk.token_ids[-1] == 2
        jsonschema.validate(json.loads(runtime.tokenizer.decode(chunk.token_ids[:-1])), PLACE)
