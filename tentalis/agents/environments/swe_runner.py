"""Runs the hidden tests of a swe episode: a program for the Python of the repository, which needs pytest alone.

Argument: a JSON file with `tree`, the folder of the repository; `paths`, folders in it from which tests import;
`files` of tests; `report`, the file to write. The report has the outcome of each test by its id: passed, failed, or
skipped. Pytest and its plugins are loaded before the repository is on the path, so that no file of the repository
stands in their place. The functions that write the report are bound before too, and the process ends with the report:
to wrap them in their modules, or to leave something for the exit of Python, has no effect on it.
"""

import json
import os
import sys
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, NoReturn


def main() -> NoReturn:
    """Runs the tests, writes the report, and ends the process with 0, also if tests fail."""
    import pytest

    quoted, remove, make, write, leave = encode_basestring_ascii, os.unlink, os.open, os.write, os._exit
    exists, new = os.path.lexists, os.O_WRONLY | os.O_CREAT | os.O_EXCL
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    tree, report = config["tree"], config["report"]
    os.chdir(tree)
    folders = [Path(tree, path) for path in config["paths"]]
    installed = [number for number, path in enumerate(sys.path) if "site-packages" in path]
    place = installed[0] if installed else len(sys.path)
    sys.path[place:place] = [str(folder) for folder in folders if folder.is_dir()]
    outcomes: dict[str, str] = {}

    class Recorder:
        """Notes the outcome of each test: failed if any of its phases failed."""

        def pytest_configure(self, config: Any) -> None:
            """See pytest. Tests are collected by these names beside those that the repository sets."""
            config.addinivalue_line("python_functions", "test")

        def pytest_runtest_logreport(self, report: Any) -> None:
            """See pytest."""
            if report.failed:
                outcomes[report.nodeid] = "failed"
            elif hasattr(report, "wasxfail") and report.when == "call":
                outcomes.setdefault(report.nodeid, "passed")  # expected failures count as SWE-bench counts them
            elif report.skipped:
                outcomes.setdefault(report.nodeid, "skipped")
            elif report.when == "call":
                outcomes.setdefault(report.nodeid, "passed")

    # --maxfail: all tests run, also if the repository's addopts stop at the first failure.
    options = ["--rootdir", tree, "-p", "no:cacheprovider", "-q", "--tb=short", "--maxfail=0"]
    pytest.main([*options, *config["files"]], plugins=[Recorder()])
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    pairs = ",".join([f"{quoted(name)}:{quoted(outcome)}" for name, outcome in outcomes.items()])
    text = f'{{"outcomes":{{{pairs}}}}}'.encode()
    if exists(report):
        remove(report)
    file = make(report, new, 0o600)
    while text:
        text = text[write(file, text) :]
    leave(0)


if __name__ == "__main__":
    main()
