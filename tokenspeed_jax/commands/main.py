"""`tokenspeed-jax COMMAND ...`: picks the command; its module is imported only then."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from tokenspeed_jax import __version__

PROG = "tokenspeed-jax"
COMMANDS = {
    "serve": "serve one model over HTTP with OpenAI's protocol",
    "generate": "continue one prompt, or hold a conversation, in this terminal and without a server",
    "bench": "put load on a running server and measure it",
    "plan": "say what would fit into a GPU's memory, without loading anything",
}
"""Command, which is also its module's name -> what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command (default: that of the process's own arguments).

    Returns:
        The command's exit code; 2 where there is no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if words == ["--version"]:
        print(f"{PROG} {__version__}")
        return 0
    if not words or words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, 1) if words else []
        said = f"unknown command {words[0]!r}" if words else "a command is missing"
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"{_usage()}\n{PROG}: error: {said}{hint}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"tokenspeed_jax.commands.{words[0]}")
    try:
        return command.run(words[1:], prog=f"{PROG} {words[0]}")
    except BrokenPipeError:
        # Whoever read the output has gone; what is left in the buffer must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _usage() -> str:
    lines = [f"usage: {PROG} COMMAND [options]", ""]
    lines += [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", f"`{PROG} COMMAND --help` lists a command's options."])
