"""One join worker under an application id of its own: `python -m tests.bench.join_ours BOOTSTRAP APP_ID STATE_DIR`."""

import sys
from pathlib import Path

from streams.app import StreamSettings, ensure_changelog, run
from streams.join.processor import JoinProcessor
from tentalis.config import Settings
from tentalis.kafka import make_codec


def main(bootstrap: str, app_id: str, state_dir: str) -> int:
    processor = JoinProcessor(make_codec(Settings(bootstrap=bootstrap)))
    processor.app_id = app_id
    ensure_changelog(bootstrap, app_id, "state", 8)
    return run(processor, StreamSettings(bootstrap=bootstrap, state_dir=Path(state_dir), instance="bench"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
