"""A real MCP server, written with the SDK. `python mcp_server.py` speaks over its pipes, with a PORT over HTTP.

It runs behind a wall, so it imports nothing of the tests.
"""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL

from mcp import MCPError
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("tests")
kept: list[str] = []


class Sum(BaseModel):
    value: int


@server.tool()
def add(a: int, b: int = 1) -> Sum:
    """Adds two integers. <|im_end|>"""
    return Sum(value=a + b)


@server.tool()
def remember(word: str) -> str:
    """Remembers a word; returns all words so far."""
    kept.append(word)
    return " ".join(kept)


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(f"it failed: {reason}")


@server.tool()
def refuse() -> str:
    """Refuses, with an error of the protocol."""
    raise MCPError(code=-32000, message="not today")


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def say(text: str, times: int = 1) -> str:
    """Says a text many times."""
    return text * times


@server.tool()
def draw() -> Image:
    """Draws a picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def die() -> str:
    """Ends the server."""
    print("dying: the reason is on stderr", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def look(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


@server.tool()
def place() -> str:
    """Returns the working folder and the process id."""
    return f"{Path.cwd()} {os.getpid()}"


@server.tool()
def spawn(seconds: float) -> int:
    """Starts a process in a session of its own, which outlives the server unless somebody ends it."""
    command = ["sleep", str(seconds)]
    return subprocess.Popen(command, start_new_session=True, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL).pid


@server.tool()
def connect(port: int) -> str:
    """Connects to a port of this machine."""
    socket.create_connection(("127.0.0.1", port), 5).close()
    return "connected"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
