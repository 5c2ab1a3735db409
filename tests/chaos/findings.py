"""The findings of a verifier of the chaos run: one line for each error."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Findings:
    """`lost`: missing records; `wrong`: records with wrong content, or unexpected ones; `doubled`: keys with two
    different records."""

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(self.lost + other.lost, self.wrong + other.wrong, self.doubled + other.doubled)
