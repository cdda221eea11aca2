"""`tokenspeed-jax serve`: the same as `python -m tokenspeed_jax.serve`."""

from collections.abc import Sequence

from tokenspeed_jax.serve import cli


def run(argv: Sequence[str], prog: str) -> int:
    """Serves until a signal; returns the exit code of `serve.cli.main`."""
    return cli.main(argv, prog)
