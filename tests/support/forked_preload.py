"""Imports of forked trainers (tests/support/forked.py), done once in the process that forks."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # as the trainer does before it imports DeepSpeed: these tests train on the CPU

from tentalis.service.imports import without_collections

with without_collections():
    import deepspeed  # noqa: F401
    import peft  # noqa: F401

    import trainer.replay.replay
    import trainer.run.loop  # noqa: F401
