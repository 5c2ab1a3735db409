"""What a prompt can go on from, and what is dropped."""

import gc

import torch

from tentalis.inference.lora import LoraAdapter
from tentalis.inference.prefix_store import MIN_TOKENS, Prefix, PrefixStore

A_PREFIX = Prefix.of(None, range(MIN_TOKENS), torch.zeros(2, 1, MIN_TOKENS, 4), torch.zeros(2, 1, MIN_TOKENS, 4))


def prefix(first: int, length: int = MIN_TOKENS, version: LoraAdapter | None = None) -> Prefix:
    size = (2, 1, length, 4)
    return Prefix.of(version, range(first, first + length), torch.full(size, float(first)), torch.zeros(size))


def adapter(name: str) -> LoraAdapter:
    return LoraAdapter(name, "", "", 1, {})


def begins(store: PrefixStore, first: int, length: int, version: LoraAdapter | None = None) -> int:
    """How many tokens of `length` consecutive ones from `first` need not be computed."""
    found = store.longest(version, range(first, first + length))
    return 0 if found is None else found[1]


def test_the_longest_beginning_of_the_same_version_is_found() -> None:
    one, other = adapter("one"), adapter("one")
    store = PrefixStore(2**20)
    for each in (prefix(0, 40), prefix(0, 60, one), prefix(500, 90)):
        store.put(each)
    assert begins(store, 0, 100) == 40
    assert begins(store, 0, 100, one) == 60
    assert begins(store, 0, 100, other) == 0, "a version of the same name has other weights"
    assert begins(store, 0, 40) == 39, "the last token is computed for its logits"
    assert begins(store, 0, MIN_TOKENS) == 0
    assert begins(store, 1, 100) == 0


def test_a_sequence_takes_the_place_of_its_beginning() -> None:
    store = PrefixStore(2**20)
    for length in (20, 50, 30):
        store.put(prefix(0, length))
    assert store.n_bytes == prefix(0, 50).n_bytes + prefix(0, 30).n_bytes
    assert begins(store, 0, 100) == 50


def test_those_that_were_not_used_go_first() -> None:
    store = PrefixStore(2 * A_PREFIX.n_bytes)
    assert store.room_for(2 * A_PREFIX.n_bytes) and not store.room_for(2 * A_PREFIX.n_bytes + 1)
    store.put(prefix(0))
    store.put(prefix(100))
    assert begins(store, 0, 50) == MIN_TOKENS
    store.put(prefix(200))
    assert [begins(store, first, 50) for first in (0, 100, 200)] == [MIN_TOKENS, 0, MIN_TOKENS]
    store.clear()
    assert store.n_bytes == 0


def test_prefixes_do_not_keep_their_version_and_go_with_it() -> None:
    version = adapter("one")
    store = PrefixStore(2**20)
    kept = prefix(0, version=version)
    store.put(kept)
    assert kept.is_of(version) and not kept.is_of(None)
    del version
    gc.collect()
    assert kept.unloaded and not kept.is_of(None), "it would be taken for the base model's"
    store.put(prefix(100))
    assert store.n_bytes == A_PREFIX.n_bytes
