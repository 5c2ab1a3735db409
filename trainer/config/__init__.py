"""The configuration of a training run.

In: a YAML or TOML file, environment variables, or another system's names. Out: an immutable `TrainerConfig`.
Begin with `trainer_config.py` (every setting); `file.py` reads and checks files, `loss.py` has the losses' settings.
"""
