"""What probes, load balancers and operators ask: readiness, version, configuration, load."""

from dataclasses import fields
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenspeed_jax import __version__
from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.served_engine import ServedEngine


class StatusRoutes:
    """`/ready`, `/version`, `/server_info` and `/load`; none of them waits for the engine."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, admission: Admission, served_name: str) -> None:
        self._engine = engine
        self._config = config
        self._admission = admission
        self._served_name = served_name

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
        ]

    async def ready(self, _request: Request) -> Response:
        """`GET /ready`: 200 while new requests are taken."""
        self._admission.check_ready()
        return _json({"status": "ready"})

    async def version(self, _request: Request) -> Response:
        """`GET /version`, in vLLM's shape."""
        return _json({"version": __version__})

    async def server_info(self, _request: Request) -> Response:
        """`GET /server_info`: the configuration without secrets, and where memory and time went at start."""
        shown = [item.name for item in fields(self._config) if item.repr]
        return _json(
            {
                "version": __version__,
                "model": self._engine.model_name,
                "served_model_name": self._served_name,
                "max_model_len": self._engine.max_model_len,
                "engine_config": self._engine.config,
                "server_config": {name: getattr(self._config, name) for name in shown},
                "memory": self._engine.memory_report,
                "start": self._engine.start_report,
            }
        )

    async def load(self, _request: Request) -> Response:
        """`GET /load`: vLLM's `server_load`, and the engine's figures under SGLang's names."""
        stats = self._engine.stats()
        return _json(
            {
                "server_load": len(self._admission.open_requests),
                "num_reqs": stats.running + stats.waiting,
                "num_running_reqs": stats.running,
                "num_waiting_reqs": stats.waiting,
                "num_tokens": stats.live_tokens,
                "token_usage": stats.kv_usage,
                "num_used_blocks": stats.parents_in_use,
                "num_total_blocks": stats.num_parents,
            }
        )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
