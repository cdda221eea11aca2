"""The server's command line, generated from the fields of its configurations."""

from collections.abc import Sequence

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.options import CommandLine, Configuration, option_name
from tokenspeed_jax.serve.config import ServerConfig

__all__ = ["DESCRIPTION", "PROG", "option_name", "parse_options"]

PROG = "python -m tokenspeed_jax.serve"
"""How the server is called, unless it is the console script that was."""
DESCRIPTION = "Serve one model over HTTP with OpenAI's protocol."


def parse_options(
    argv: Sequence[str] | None = None, prog: str = PROG, description: str = DESCRIPTION
) -> tuple[EngineConfig, ServerConfig]:
    """Reads the command line (default: the process's own).

    Any mistake prints the usage and one line that names option, value and what is allowed, then exits with 2.
    """
    parsed = CommandLine(
        prog,
        description,
        Configuration(ServerConfig),
        Configuration(EngineConfig, positional="model"),
    ).parse(argv)
    return parsed.of(EngineConfig), parsed.of(ServerConfig)
