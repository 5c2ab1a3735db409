"""What a forked trainer begins with (tests/forked.py): imported once, in the process that forks."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # as the trainer sets it before it imports DeepSpeed: these tests train on the CPU

import deepspeed  # noqa: F401
import peft  # noqa: F401

import trainer.loop
import trainer.replay  # noqa: F401
