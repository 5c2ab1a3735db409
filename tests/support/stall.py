"""The longest time for which a server does not answer one client while it works on another one's request."""

import threading
import time
from collections.abc import Callable

import httpx


def longest_stall(url: str, path: str, work: Callable[[], object]) -> tuple[float, float]:
    """Runs `work` while another client asks for `path` again and again. Returns seconds: its longest answer, and the
    time of `work`."""
    gaps: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            while not stop.is_set():
                asked = time.monotonic()
                http.get(path).raise_for_status()
                gaps.append(time.monotonic() - asked)
                time.sleep(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while not gaps:
            time.sleep(0.01)
        gaps.clear()
        began = time.monotonic()
        work()
        took = time.monotonic() - began
    finally:
        stop.set()
        thread.join()
    return max(gaps), took
