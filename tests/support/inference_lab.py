"""A tiny Llama with a real tokenizer, adapters for it, a server around it, and the trainer's own log-probs."""

import queue
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tentalis.inference.adapter_cache import AdapterCache
from tentalis.inference.engine import InferenceEngine
from tentalis.inference.jobs import EngineError, GeneratedChunk, GenerateJob, ScoreJob
from tentalis.inference.lora import LoraAdapter
from tentalis.inference.runtime import ModelRuntime
from tentalis.inference.sampling import SamplingParams
from tentalis.inference.scoring import ScoredTokens
from tentalis.inference.server import build_app
from tentalis.storage.file_cache import FileCache

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    "Every task goes out, every result comes back, and the log remembers them all.",
    "user assistant system",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every text has tokens; 320 tokens with the three special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(folder: Path, seed: int = 0, heads: int = 4, hidden_size: int = 64) -> Path:
    """A 2-layer Llama with grouped-query attention and random weights, large enough that no distribution is flat."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(model: Path, folder: Path, seed: int, **options: Any) -> Path:
    """A PEFT folder with random A and B (fp32), saved by PEFT itself."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(seed)
    config = LoraConfig(
        **({"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | options)
    )
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def trainer_logprobs(
    model: Path, adapter: Path | None, tokens: Sequence[int], temperature: float = 1.0
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], torch.Tensor]:
    """Plain transformers + PEFT in fp32: log p of each token given its prefix (first NaN), and the log-softmax rows."""
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        module = PeftModel.from_pretrained(module, str(adapter))
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        rows = (module(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
    chosen = rows[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[np.nan], chosen.numpy()]).astype(np.float32), rows


class Lab:
    """A running engine over a model folder, with calls that wait for their results."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.model = model
        self.runtime = ModelRuntime(model, torch.device("cpu"), torch.float32)
        self.engine = InferenceEngine(self.runtime, threads=2, **options)
        self.adapters = AdapterCache(self.runtime, limit=3, files=FileCache(Path(tempfile.mkdtemp()), 2**30))

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int = 1,
        adapters: Sequence[LoraAdapter | None] | None = None,
        **params: Any,
    ) -> list[list[GeneratedChunk]]:
        """All prompts at once; per prompt its samples in order."""
        return self.generate_each(prompts, [params] * len(prompts), n, adapters)

    def generate_each(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[dict[str, Any]],
        n: int = 1,
        adapters: Sequence[LoraAdapter | None] | None = None,
    ) -> list[list[GeneratedChunk]]:
        """The same with parameters of each prompt."""
        results: queue.Queue[tuple[int, GeneratedChunk | ScoredTokens | EngineError]] = queue.Queue()
        with self.engine._wake:  # the engine sees all of them at once, so the batches are always the same
            for place, prompt in enumerate(prompts):
                adapter = adapters[place] if adapters else None
                sink = lambda result, place=place: results.put((place, result))  # noqa: E731
                self.engine.submit(GenerateJob(prompt, SamplingParams(**params[place]), n, adapter, False, sink))
        samples: list[list[GeneratedChunk]] = [[] for _ in prompts]
        for _ in range(n * len(prompts)):
            place, result = results.get(timeout=60)
            if not isinstance(result, GeneratedChunk):
                raise AssertionError(f"not a chunk: {result!r}")
            samples[place].append(result)
        return [sorted(chunks, key=lambda chunk: chunk.index) for chunks in samples]

    def score(
        self,
        sequences: Sequence[list[int]],
        adapters: Sequence[LoraAdapter | None] | None = None,
        temperature: float = 1.0,
        top: int = 0,
    ) -> list[ScoredTokens]:
        """All sequences at once."""
        results: queue.Queue[tuple[int, GeneratedChunk | ScoredTokens | EngineError]] = queue.Queue()
        for place, tokens in enumerate(sequences):
            adapter = adapters[place] if adapters else None
            sink = lambda result, place=place: results.put((place, result))  # noqa: E731
            self.engine.submit(ScoreJob(tokens, temperature, top, adapter, sink))
        found: dict[int, ScoredTokens] = {}
        for _ in sequences:
            place, result = results.get(timeout=60)
            if not isinstance(result, ScoredTokens):
                raise AssertionError(f"not scores: {result!r}")
            found[place] = result
        return [found[place] for place in range(len(sequences))]


@contextmanager
def running_server(lab: Lab, served_name: str = "tiny", max_model_len: int = 256) -> Iterator[str]:
    """The HTTP server over a lab's engine, on a free port; yields its address. Stops the engine in the end."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # a call before the server's thread has begun waits
    app = build_app(lab.engine, lab.adapters, served_name, str(lab.model), max_model_len)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    lab.engine.start()
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        lab.engine.stop()
        listener.close()
