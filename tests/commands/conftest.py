"""A server over a fake engine, for the commands that need one."""

import pytest

from ..serve.conftest import address, engine
from ..serve.fake_engine import FakeEngine

__all__ = ["address", "base_url", "engine"]


@pytest.fixture
def base_url(engine: FakeEngine, address: tuple[str, int]) -> str:
    """Where `engine` is served; its context is long enough for short prompts."""
    del engine
    return f"http://{address[0]}:{address[1]}"
