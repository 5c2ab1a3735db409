"""The family tree of a policy's runs, folded from manifests. Pure.

Step s of a run has the version `first_version + s`; step 0 of a run with a parent has the parent's weights at
`parent_step`. Versions of one policy increase over all its runs, so a version belongs to the last run that began at or
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
        """All runs, oldest first."""
        return sorted(self._first, key=self._first.__getitem__)

    def parent(self, run: str) -> Node | None:
        """The node that a run continues from, None for a root."""
        return self._parent.get(run)

    def chain(self, node: Node) -> list[Node]:
        """The node, then the parent nodes of its run, of its parent's run, and so on; youngest first."""
        found = [node]
        while (parent := self._parent.get(found[-1].run)) is not None and parent.run not in {n.run for n in found}:
            found.append(parent)
        return found

    def behind(self, node: Node) -> dict[str, int]:
        """Maps the node's run and its ancestors to the last step of each that the node's weights include."""
        return dict(self.chain(node))

    def path(self, run: str) -> list[str]:
        """A run and its ancestors, youngest first."""
        return [node.run for node in self.chain(Node(run, 0))]

    def stem(self, run: str) -> str | None:
        """The run that a rollback ended and replaced by this branch (`branch_name`); None if `run` is not a branch. The
        branch may continue from a different run."""
        name, _, number = run.rpartition(".")
        return name if number.isdigit() and self.parent(run) is not None else None

    def family(self, run: str) -> list[str]:
        """All runs connected to this one as parent, child or branch, oldest first, including abandoned ones."""
        linked = [self._linked(other) for other in self._first]
        found: set[str] = set()
        reached = {run}
        while reached != found:
            found = reached
            reached = found.union(*(links for links in linked if links & found))
        return [other for other in self.runs if other in found] or [run]

    def _linked(self, run: str) -> set[str]:
        parent, stem = self.parent(run), self.stem(run)
        return {run, *([] if parent is None else [parent.run]), *([] if stem is None else [stem])}

    def branches(self, run: str) -> list[str]:
        """The run of a configuration and all its branches, oldest first; `run` is any of them."""
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
        """The node whose weights a version has, None for a version before the first run."""
        started = [run for run in self.runs if self._first[run] <= version]
        return Node(started[-1], version - self._first[started[-1]]) if started else None

    def version(self, node: Node) -> int:
        """The version of a node. Raises KeyError for an unknown run."""
        return self._first[node.run] + node.step

    def depth(self, node: Node) -> int:
        """Optimizer steps from the root's initial adapter."""
        return sum(ancestor.step for ancestor in self.chain(node))

    def own_steps(self, run: str, node: Node) -> int:
        """Optimizer steps of a run's configuration that a node's weights include: those of the run and its branches,
        without those of another run from whose version a branch began."""
        own = self.branches(run)
        return sum(ancestor.step for ancestor in self.chain(node) if ancestor.run in own)

    def distance(self, one: Node, other: Node) -> int | None:
        """Optimizer steps on the path between two nodes, through their last common node; None if they have none."""
        left, right = (dict(self.chain(node)) for node in (one, other))
        shared = next((run for run in left if run in right), None)
        if shared is None:
            return None
        fork = Node(shared, min(left[shared], right[shared]))
        return self.depth(one) + self.depth(other) - 2 * self.depth(fork)

    def staleness(self, head: int, sampled: int) -> int:
        """Optimizer steps between the version in training and the version that sampled. For unrelated runs it is the
        difference of the version numbers."""
        one, other = self.node(head), self.node(sampled)
        found = None if one is None or other is None else self.distance(one, other)
        return head - sampled if found is None else found


def _number(run: str, branch: str) -> int | None:
    """Returns the number N if `branch` is `run.N`, else None."""
    name, _, number = branch.rpartition(".")
    return int(number) if name == run and number.isdigit() else None
