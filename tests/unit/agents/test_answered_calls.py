"""The calls that are answered from outside of a wall: how their arguments are read."""

import errno
from dataclasses import dataclass

import pytest

from tests.support.walls import available_wall

PAGE = 4096


@dataclass
class Caller:
    """The memory of a calling process: pages by their address. A read that touches another page fails as a whole."""

    pages: dict[int, bytes]

    def read(self, address: int, size: int) -> bytes | None:
        first, last = address // PAGE * PAGE, (address + size - 1) // PAGE * PAGE
        if any(page not in self.pages for page in range(first, last + 1, PAGE)):
            return None
        memory = b"".join(self.pages[page] for page in range(first, last + 1, PAGE))
        return memory[address - first : address - first + size]


def page(text: bytes, at: int = 0) -> bytes:
    return (b"x" * at + text).ljust(PAGE, b"x")


@pytest.fixture(autouse=True)
def _wall() -> None:
    available_wall()


def test_a_path_is_read_page_by_page() -> None:
    from tentalis.agents.sandbox.attributes import _path_at

    alone = Caller({PAGE: page(b"abc\0", PAGE - 4)})
    assert _path_at(alone, 2 * PAGE - 4) == b"abc", "nothing behind the page of the path's end is read"
    two = Caller({PAGE: page(b"ab", PAGE - 2), 2 * PAGE: page(b"cd\0")})
    assert _path_at(two, 2 * PAGE - 2) == b"abcd", "a path goes on in the next page"
    open_end = Caller({PAGE: page(b"abc", PAGE - 3)})
    with pytest.raises(OSError) as missing:
        _path_at(open_end, 2 * PAGE - 3)
    assert missing.value.errno == errno.EFAULT
    long = Caller({PAGE: b"x" * PAGE, 2 * PAGE: page(b"\0")})
    with pytest.raises(OSError) as too_long:
        _path_at(long, PAGE)
    assert too_long.value.errno == errno.ENAMETOOLONG
