"""The error of data, rewards or options that cannot be used."""


class LearnError(ValueError):
    """Prompts, a reward function or a run that cannot be used: what is wrong, where, and what to do."""
