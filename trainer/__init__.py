"""The trainer: rollouts in, LoRA adapters out.

In: tentalis.rollouts.v1 and a TrainerConfig. Out: adapters and checkpoints on disk; manifests, batch plans, step
results and policy updates on the log. Begin with `trainer.run.loop` (live training), then `trainer.data.plan`,
`trainer.step.step` and `trainer.step.objective`; `trainer.replay.replay` trains a recorded run again.
"""

import os

# Set before torch loads OpenMP: waiting threads must sleep, not spin. The trainer shares its cores with the model
# server and Kafka, and spinning makes a step ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
