"""One join worker with its own application id: `python -m tests.bench.join_ours BOOTSTRAP APP_ID STATE_DIR`.

The options set values that concurrent workers must not share.
"""

import argparse
import sys
from pathlib import Path

from streams.apps.join.processor import JoinProcessor
from streams.runtime.worker import StreamSettings, ensure_changelog, run
from tentalis.kafka.codec import make_codec
from tentalis.service.settings import Settings


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("app_id")
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--state", choices=["memory", "rocksdb"], default="memory")
    parser.add_argument("--instance", default="bench")
    parser.add_argument("--metrics-port", type=int)
    options = parser.parse_args()
    codec = make_codec(Settings(bootstrap=options.bootstrap))
    processor = JoinProcessor(codec)
    processor.app_id = options.app_id
    ensure_changelog(options.bootstrap, options.app_id, "state", 8)
    settings = StreamSettings(
        bootstrap=options.bootstrap,
        state_dir=options.state_dir,
        state=options.state,
        metrics_port=options.metrics_port,
        instance=options.instance,
    )
    return run(processor, settings)


if __name__ == "__main__":
    sys.exit(main())
