"""Which run goes on from which, folded from manifests. Pure.

A run's step s has the version `first_version + s`; step 0 of a run with a parent has the parent's weights at
`parent_step`. Versions of one policy rise over all its runs, so a version belongs to the run that began last at or
before it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from schemas.records import RunManifest


class Node(NamedTuple):
    """The weights after a step of a run."""

    run: str
    step: int


class Lineage:
    """The runs of one policy."""

    def __init__(self, manifests: Iterable[RunManifest]) -> None:
        self._first: dict[str, int] = {}
        self._parent: dict[str, Node | None] = {}
        for manifest in manifests:
            if manifest.run_id in self._first:
                continue
            self._first[manifest.run_id] = manifest.first_version
            parent = None
            if manifest.parent_run is not None and manifest.parent_step is not None:
                parent = Node(manifest.parent_run, manifest.parent_step)
            self._parent[manifest.run_id] = parent

    @property
    def runs(self) -> list[str]:
        """All runs, the oldest first."""
        return sorted(self._first, key=self._first.__getitem__)

    def parent(self, run: str) -> Node | None:
        """What a run goes on from."""
        return self._parent.get(run)

    def chain(self, node: Node) -> list[Node]:
        """The node and where its run, and that one's parent, and so on, branched off; the youngest first."""
        found = [node]
        while (parent := self._parent.get(found[-1].run)) is not None and parent.run not in {n.run for n in found}:
            found.append(parent)
        return found

    def behind(self, node: Node) -> dict[str, int]:
        """Run to the last of its steps that the node's weights have gone through."""
        return dict(self.chain(node))

    def path(self, run: str) -> list[str]:
        """A run and what it goes on from, the youngest first."""
        return [node.run for node in self.chain(Node(run, 0))]

    def stem(self, run: str) -> str | None:
        """The run that a rollback ended with this one as its branch (`branch_name`), None for what is no branch. It may
        go on from another run altogether."""
        name, _, number = run.rpartition(".")
        return name if number.isdigit() and self.parent(run) is not None else None

    def family(self, run: str) -> list[str]:
        """All runs that go on from one another or are branches of one another, the oldest first: what was abandoned
        included."""
        linked = [self._linked(other) for other in self._first]
        found: set[str] = set()
        more = {run}
        while more != found:
            found = more
            more = found.union(*(links for links in linked if links & found))
        return [other for other in self.runs if other in found] or [run]

    def _linked(self, run: str) -> set[str]:
        parent, stem = self.parent(run), self.stem(run)
        return {run, *([] if parent is None else [parent.run]), *([] if stem is None else [stem])}

    def branches(self, run: str) -> list[str]:
        """The run of a configuration and all its branches, the oldest first; `run` is any of them."""
        stem = self.stem(run) or run
        return [other for other in self.runs if stem in (other, self.stem(other))] or [run]

    def current(self, run: str) -> str:
        """The youngest branch of this run (`branch_name`), the run itself if there is none."""
        return next((other for other in reversed(self.runs) if self.stem(other) == run), run)

    def branch_name(self, run: str) -> str:
        """The id of the run's next branch: `run.1`, `run.2`, and so on."""
        taken = [number for other in self._first if (number := _number(run, other)) is not None]
        return f"{run}.{max(taken, default=0) + 1}"

    def node(self, version: int) -> Node | None:
        """Whose weights a version is, None for one from before the first run."""
        begun = [run for run in self.runs if self._first[run] <= version]
        return Node(begun[-1], version - self._first[begun[-1]]) if begun else None

    def version(self, node: Node) -> int:
        """The version of a node. Raises KeyError for a run that is not known."""
        return self._first[node.run] + node.step

    def depth(self, node: Node) -> int:
        """Optimizer steps from the root's initial adapter."""
        return sum(each.step for each in self.chain(node))

    def distance(self, one: Node, other: Node) -> int | None:
        """Optimizer steps on the way between two nodes, through where their ways parted; None if they never met."""
        left, right = (dict(self.chain(node)) for node in (one, other))
        shared = next((run for run in left if run in right), None)
        if shared is None:
            return None
        parted = Node(shared, min(left[shared], right[shared]))
        return self.depth(one) + self.depth(other) - 2 * self.depth(parted)

    def staleness(self, head: int, sampled: int) -> int:
        """Optimizer steps between the version that is trained and the one that sampled. Over runs that have nothing to
        do with each other it is the difference of the numbers."""
        one, other = self.node(head), self.node(sampled)
        found = None if one is None or other is None else self.distance(one, other)
        return head - sampled if found is None else found


def _number(run: str, branch: str) -> int | None:
    """N of `run.N`."""
    name, _, number = branch.rpartition(".")
    return int(number) if name == run and number.isdigit() else None
