"""Fixtures of the server's unit tests: a fake engine, and the application in process or behind a socket."""

import contextlib
import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn
from starlette.testclient import TestClient

from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.cli import bind
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import FakeEngine

MAX_BODY_BYTES = 16384


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    config = ServerConfig(max_body_bytes=MAX_BODY_BYTES)
    with TestClient(create_app(engine, config), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[tuple[str, int]]:
    """Host and port of a uvicorn thread that serves `engine`."""
    with listening(engine, ServerConfig(port=0)) as address:
        yield address


@contextlib.contextmanager
def listening(engine: FakeEngine, config: ServerConfig) -> Iterator[tuple[str, int]]:
    """Host and port of a uvicorn thread that serves `engine` while the context lasts."""
    listener = bind(config)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), log_config=None, lifespan="on", ws="none"))
    started = threading.Event()
    startup = server.startup

    async def signalling_startup(sockets=None) -> None:
        await startup(sockets)
        started.set()

    server.startup = signalling_startup
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert started.wait(30)
    yield listener.getsockname()[:2]
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def openai_client(address: tuple[str, int]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{address[0]}:{address[1]}/v1", api_key="none", max_retries=0) as client:
        yield client
