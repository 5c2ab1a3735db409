"""A second stack on the Kafka of the first one: by mistake, and to share its work."""

from __future__ import annotations

from collections.abc import Iterator

from tests.drill.fault import Sight, fault
from tests.drill.stack import Stack


@fault("stack", "namespaces.md", code=1, says="`tentalis up --join` shares the work of that stack")
def a_second_stack_that_joins(stack: Stack) -> Iterator[Sight]:
    """It is refused without --join; with it, it takes a part of the work, and leaves the first one working."""
    stack.works("before-the-second-stack")
    stack.shell.env |= {"KAFKA": str(stack.settings.bootstrap), "SECOND": str(stack.folder / "second")}
    asked = stack.work.ask("asked-before-the-second-stack", 4)
    yield stack.shell.run("TENTALIS_BOOTSTRAP=$KAFKA TENTALIS_HOME=$SECOND tentalis up --policy-model $MODEL", 120)
    stack.work.answer(asked)
    stack.work.settled("asked-before-the-second-stack")
    stack.works("after-the-second-stack")
