"""The text that the policy sees of a command: its output, head and tail, and how it ended. Pure."""

from tentalis.agents.sandbox import CommandEnd, CommandOutput
from tentalis.text.tool_output import head_and_tail, readable_text


def shown(output: CommandOutput, limit: int) -> str:
    """Returns both streams of a command in about `limit` characters, and how it ended unless all went well."""
    text = readable_text(output.stdout + (b"\n" if output.stdout and output.stderr else b"") + output.stderr).strip()
    ending = ended(output)
    parts = (head_and_tail(text, limit), f"[{ending}]" if ending else "")
    return "\n".join(part for part in parts if part) or "[no output]"


def ended(output: CommandOutput) -> str:
    """Returns how a command ended, empty if all went well."""
    return {
        CommandEnd.TIMED_OUT: "stopped: the time limit was reached",
        CommandEnd.TOO_MUCH_OUTPUT: "stopped: the output was too long",
        CommandEnd.TOO_MUCH_DISK: "stopped: the folder holds too many bytes or files",
        CommandEnd.KILLED: "killed: a limit of memory or CPU was reached, or a signal came",
        CommandEnd.EXITED: f"exit code {output.exit_code}" if output.exit_code else "",
    }[output.end]
