"""Asks a process of this machine over HTTP."""

import urllib.error
import urllib.request


def answer_of(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET; 0 and the reason if there is no answer, as from a process that still begins."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
