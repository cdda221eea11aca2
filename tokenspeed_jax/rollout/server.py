"""`python -m tokenspeed_jax.rollout.server`: the server with routes for a trainer in another process."""

import logging
import sys
from collections.abc import Sequence
from typing import Protocol

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.rollout.rollout_engine import RolloutEngine
from tokenspeed_jax.rollout.routes import RolloutRoutes
from tokenspeed_jax.rollout.weight_folder import WeightFolderReader
from tokenspeed_jax.serve import cli
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.extension import Extension

PROG = "python -m tokenspeed_jax.rollout.server"
"""How the server is called."""
DESCRIPTION = (
    "Serve one model over HTTP with OpenAI's protocol, and take new weights for it, pause and give memory back over "
    "admin routes, for a trainer in another process. The options are those of tokenspeed_jax.serve."
)
_LOG = logging.getLogger(__name__)


class ConfiguredEngine(RolloutEngine, Protocol):
    """An engine that says what it was started with."""

    @property
    def config(self) -> EngineConfig: ...


def extension(engine: ConfiguredEngine, config: ServerConfig) -> Extension:
    """What the server has beside the routes of `tokenspeed_jax.serve`.

    Raises:
        CheckpointError: the configuration of the served model is gone.
    """
    if config.admin_api_key is None:
        _LOG.warning("the routes for trainers are off; start the server with --admin-api-key KEY to have them")
    return RolloutRoutes(engine, config, WeightFolderReader.of_served(engine.config)).extension()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server; options and exit codes are those of `serve.cli.main`."""
    return cli.main(argv, PROG, DESCRIPTION, extension)


if __name__ == "__main__":
    sys.exit(main())
