"""What a verifier of the chaos run finds: one line for each thing that must not be."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Findings:
    """`lost`: what is missing; `wrong`: what says something else, or should not be there; `doubled`: keys under which
    two different things lie."""

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(self.lost + other.lost, self.wrong + other.wrong, self.doubled + other.doubled)
