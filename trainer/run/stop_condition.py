"""The condition under which a trainer that was started by hand stops: after N steps, when caught up, or never. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopCondition:
    """`steps`: stop after so many steps of this start, however long their rollouts take to arrive. `caught_up`: stop
    when no full batch is on the log. Neither: never stop. With a condition the hours of training are ignored, because
    a person asked for training now."""

    steps: int | None = None
    caught_up: bool = False

    @property
    def ignores_training_hours(self) -> bool:
        return self.steps is not None or self.caught_up

    def reached(self, done: int) -> bool:
        """True if `done` steps fulfil the condition."""
        return self.steps is not None and done >= self.steps

    def remaining(self, done: int) -> "StopCondition":
        """Returns the remaining condition after `done` steps."""
        return self if self.steps is None else StopCondition(max(0, self.steps - done), self.caught_up)

    def arguments(self) -> list[str]:
        """Returns the condition as command line arguments of a rank."""
        steps = [] if self.steps is None else ["--steps", str(self.steps)]
        return [*steps, *(["--until-caught-up"] if self.caught_up else [])]


FOREVER = StopCondition()
