"""The order in which the processes of one test run take the files."""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FromBothEnds(LoadFileScheduling):  # type: ignore[misc]  # its package has no types
    """All processes take the next file from the front, where the long ones with brokers are, except the last: it takes
    files from the end. Tests of processes and brokers wait a third of their time; unit tests use that time."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is self.nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
