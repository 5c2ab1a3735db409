"""Grammars that constrain which tokens may be sampled next, compiled by llguidance.

Begin with `GrammarCompiler`. A grammar is text in llguidance's variant of Lark; response_format.py writes it.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tentalis.service.packages import require

MAX_GRAMMAR_BYTES = 256 << 10
"""The longest grammar, with the schemas in it."""
# llguidance counts its work: about 14,000 to 50,000 units per millisecond. The first two bound compilation, the next
# three each token, the last one memory (1 to 2 kB per state).
_LIMITS = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
# Compilation outside of those limits, in grammar_check.py.
_COMPILE_CPU_S = 2
_COMPILE_BYTES = 1 << 30
_CHECK = Path(__file__).with_name("grammar_check.py")
# CPU seconds that the masks of one request may take: a start, during which states are built, and a mean per token.
_CPU_S = 0.25
_CPU_S_PER_TOKEN = 0.002
# Compiled grammars that are kept: agents send the same tools with every call.
_KEPT = 8
# Seconds that a request waits for its grammar, compilations before it included.
_WAIT_S = 30.0
_WORD_BITS = 32


class InvalidGrammar(Exception):
    """The grammar cannot be compiled, or is too large; the message names the reason."""


class GrammarFailed(Exception):
    """A grammar takes too long for a token, or allows none; the message names the reason."""


class GrammarsBusy(Exception):
    """Other requests' grammars take too long to compile: the same request may succeed later."""


class Grammar:
    """A compiled grammar for one request, whose samples share a budget of CPU time."""

    def __init__(self, compiled: Any, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self.compiled = compiled
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._cpu_s = 0.0
        self._tokens = 0

    def matcher(self) -> "GrammarMatcher":
        """Returns a matcher at the beginning of the grammar."""
        return GrammarMatcher(self, self.compiled.deep_copy(), self._eos, self._vocab_size)

    def spend(self, cpu_s: float, tokens: int) -> None:
        """Counts CPU seconds and sampled tokens. Raises GrammarFailed if the time is more than the tokens allow."""
        self._cpu_s += cpu_s
        self._tokens += tokens
        if self._cpu_s > _CPU_S + _CPU_S_PER_TOKEN * self._tokens:
            raise GrammarFailed(
                f"The grammar took {self._cpu_s:.1f} s of CPU time for {self._tokens} tokens, more than this server "
                "allows. Simplify the schema: shorter patterns, fewer alternatives, smaller counts."
            )


class GrammarMatcher:
    """The place of one sample in its grammar. `eos_token_ids`: the first is the one that the grammar knows."""

    def __init__(self, grammar: Grammar, matcher: Any, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._eos = eos_token_ids
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // _WORD_BITS), dtype=np.int32)

    def allowed(self) -> NDArray[np.bool_]:
        """Returns the tokens that may come next, bool [vocab]: True for at least one. Raises GrammarFailed."""
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check(time.thread_time() - began, 0)
        bits = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little").astype(bool)
        if bits[self._eos[0]]:
            bits[list(self._eos)] = True
        if not bits.any():
            raise GrammarFailed("The vocabulary has no token that the grammar allows here.")
        return bits

    def advance(self, token: int) -> None:
        """Takes the sampled token. Raises GrammarFailed."""
        began = time.thread_time()
        self._matcher.consume_token(self._eos[0] if token in self._eos else token)
        self._check(time.thread_time() - began, 1)

    def _check(self, cpu_s: float, tokens: int) -> None:
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            nothing = "no text that it allows begins so" if reason == "NoExtensionBias" else reason
            raise GrammarFailed(f"The grammar failed: {nothing}")
        self._grammar.spend(cpu_s, tokens)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, one at a time, on a thread; keeps the last ones."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        first = tokenizer.eos_token_id
        known = () if first is None else (int(first),)
        self._eos = (*known, *sorted(eos_token_ids - set(known)))
        self._vocabulary: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def compile(self, source: str) -> Grammar:
        """Returns the compiled grammar. Raises InvalidGrammar, GrammarsBusy, and MissingExtra if llguidance is not
        installed."""
        if not self._eos:
            raise InvalidGrammar("this model has no end token, so no answer could end where its form ends")
        size = len(source.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"it has {size:,} bytes; this server accepts at most {MAX_GRAMMAR_BYTES:,}")
        found = self._kept.get(source)
        if found is None:
            # A compilation that runs cannot be given up. Only this thread compiles, so the next one begins after it.
            running = asyncio.get_running_loop().run_in_executor(self._thread, self._kept_or_compiled, source)
            try:
                found = await asyncio.wait_for(running, _WAIT_S)
            except TimeoutError as error:
                raise GrammarsBusy(f"The server compiled grammars for {_WAIT_S:g} s; try again later.") from error
        with suppress(KeyError):  # the thread may just have dropped it
            self._kept.move_to_end(source)
        return Grammar(found, self._eos, self._vocab_size)

    def _kept_or_compiled(self, source: str) -> Any:
        """Returns the matcher of a grammar that may have been compiled since it was asked for."""
        found = self._kept.get(source)
        if found is None:
            found = self._kept[source] = self._compiled(source)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _compiled(self, source: str) -> Any:
        """Returns llguidance's matcher at the beginning of the grammar. It is only copied afterwards."""
        require("An answer in a given form", "serve")
        import llguidance

        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(_Vocabulary(self._tokenizer, self._vocab_size, self._eos))
        _check_compilation(source)
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidGrammar(_first_line(matcher.get_error()))
        try:
            # Builds the first states here, not between two tokens of other requests.
            Grammar(matcher, self._eos, self._vocab_size).matcher().allowed()
        except GrammarFailed as error:
            raise InvalidGrammar(str(error)) from error
        return matcher


def _check_compilation(source: str) -> None:
    """Compiles the grammar in another process. Raises InvalidGrammar if it cannot be compiled, or not within limits of
    time and memory, GrammarsBusy if the machine gives the process no time."""
    asked = {"grammar": source, "limits": _LIMITS, "cpu_s": _COMPILE_CPU_S, "memory_bytes": _COMPILE_BYTES}
    command = [sys.executable, "-P", str(_CHECK)]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, timeout=_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise GrammarsBusy(f"The machine compiled no grammar within {_WAIT_S:g} s; try again later.") from error
    if done.returncode < 0:
        raise InvalidGrammar(
            f"compiling it takes more than {_COMPILE_CPU_S} s of CPU time or {_COMPILE_BYTES >> 20} MiB of memory. "
            "Simplify the schema: shorter patterns, fewer alternatives, smaller counts"
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    if problem := _first_line(done.stdout):
        raise InvalidGrammar(problem)


class _Vocabulary:
    """The tokenizer as llguidance reads it: the bytes of each token, and the tokens that no text matches."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None
        self.tokens, special = token_bytes(tokenizer, vocab_size)
        self.special_token_ids = sorted(special | set(eos_token_ids))

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text that a grammar forces."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def token_bytes(tokenizer: Any, vocab_size: int) -> tuple[list[bytes], set[int]]:
    """Returns the bytes of text of each token id, and the ids that are no text: special tokens, which decoding leaves
    out, and ids that the tokenizer does not have. Raises InvalidGrammar for a vocabulary that is neither of bytes nor
    of pieces with byte tokens."""
    kinds = _decoder_kinds(tokenizer.backend_tokenizer)
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {token for token, each in added.items() if each.special}
    tokens: list[bytes] = []
    for token, piece in enumerate(tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))):
        if piece is None:
            special.add(token)
            tokens.append(b"")
        elif token in special or token in added:
            tokens.append(piece.encode())
        elif "ByteLevel" in kinds:
            tokens.append(_byte_level_bytes(piece))
        elif "ByteFallback" in kinds:
            tokens.append(_piece_bytes(piece))
        else:
            raise InvalidGrammar(
                "this model's tokenizer has no tokens for single bytes, so its answers cannot be constrained; use vLLM"
            )
    special |= set(range(len(tokens), vocab_size))
    tokens += [b""] * (vocab_size - len(tokens))
    return tokens, special


def _decoder_kinds(backend: Any) -> set[str]:
    """Returns the types of a tokenizer's decoders."""
    if backend.decoder is None:
        return set()
    found = json.loads(backend.decoder.__getstate__())
    return {found["type"], *(each["type"] for each in found.get("decoders", ()))}


def _byte_level_bytes(piece: str) -> bytes:
    """Returns the bytes of a token of a byte-level vocabulary, as its decoder writes it: a token with a character that
    stands for no byte is plain text."""
    found = [_BYTES.get(char) for char in piece]
    known = [byte for byte in found if byte is not None]
    return bytes(known) if len(known) == len(found) else piece.encode()


def _piece_bytes(piece: str) -> bytes:
    """Returns the bytes of a SentencePiece token: `<0x0A>` is a byte, `▁` a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _byte_of_character() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for: printable Latin-1 characters stand
    for themselves, the other bytes are written from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_of_character()


def _first_line(message: str) -> str:
    """Returns the first line of llguidance's message: the others show the grammar."""
    return message.strip().partition("\n")[0][:500]
