"""The parts of a task that an environment reads: the data of the verifier `episode`, and the messages around a named
task."""

from typing import TypeVar

from schemas.records import Message, Task
from tentalis.agents.environments.protocol import EnvironmentFault
from tentalis.rewards.verdict import BadVerifierData, VerifierData, data_of

D = TypeVar("D", bound=VerifierData)


def episode_data(task: Task, kind: type[D]) -> D:
    """Returns the data of the verifier `episode`, the defaults for a task with another verifier or none. Raises
    EnvironmentFault."""
    if task.verifier is None or task.verifier.name != "episode":
        return kind()
    try:
        return data_of(task, kind)
    except BadVerifierData as error:
        raise EnvironmentFault(str(error)) from error


def task_name(task: Task, name: str | None) -> str:
    """Returns the name that the data of the verifier give, else the last message."""
    return name or task.messages[-1].content.strip()


def named_prompt(task: Task, name: str, rules: str, last: str) -> tuple[Message, ...]:
    """Returns the rules of an environment, what the task says beside its name, and `last` as the user's message. A
    system message of the task comes before the rules."""
    said = [message for message in task.messages if message.content.strip() != name]
    if said and said[0].role == "system":
        rules = f"{said.pop(0).content}\n\n{rules}"
    return (Message(role="system", content=rules), *said, Message(role="user", content=last))
