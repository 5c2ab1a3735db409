"""When a trainer that was started by hand is done. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """`steps`: so many of this start, however long their rollouts take to come; `caught_up`: it ends when no full batch
    is on the log. Neither: it goes on. With a goal the hours of training do not count: somebody asked for it now.
    """

    steps: int | None = None
    caught_up: bool = False

    @property
    def by_hand(self) -> bool:
        return self.steps is not None or self.caught_up

    def reached(self, done: int) -> bool:
        """Whether `done` steps are all that was asked for."""
        return self.steps is not None and done >= self.steps

    def after(self, done: int) -> "Goal":
        """What is left of it after `done` steps."""
        return self if self.steps is None else Goal(max(0, self.steps - done), self.caught_up)

    def arguments(self) -> list[str]:
        """For the command line of a rank."""
        steps = [] if self.steps is None else ["--steps", str(self.steps)]
        return [*steps, *(["--until-caught-up"] if self.caught_up else [])]


FOREVER = Goal()
