"""A server on a socket, over a fake engine, for the clients of the protocols."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.cli import bind
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import FakeEngine


@contextmanager
def listening(engine: FakeEngine, config: ServerConfig) -> Iterator[str]:
    """The URL of a server that runs as long as the context; closes the engine behind it."""
    listener = bind(config)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), log_config=None, lifespan="on", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    host, port = listener.getsockname()[:2]
    yield f"http://{host}:{port}"
    server.should_exit = True
    thread.join(30)
    engine.close()
