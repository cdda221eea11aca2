"""A device without memory ends in a message that says what to change, at start and in service."""

import jax
import pytest

from tokenspeed_jax import Engine, EngineConfig
from tokenspeed_jax.engine import assembly, engine
from tokenspeed_jax.errors import OutOfDeviceMemory
from tokenspeed_jax.serve import cli

from .conftest import GOLDEN

MODEL = str(GOLDEN / "tiny" / "llama")
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456789 bytes."


def failing(message: str):
    def fail(*_arguments: object, **_options: object) -> None:
        raise jax.errors.JaxRuntimeError(message)

    return fail


@pytest.mark.parametrize("place", [(engine, "assemble"), (assembly, "init_device_state")])
def test_start_without_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch, place: tuple) -> None:
    monkeypatch.setattr(*place, failing(EXHAUSTED))
    with pytest.raises(OutOfDeviceMemory, match=r"--gpu-memory-utilization.*123456789 bytes") as error:
        Engine(EngineConfig(model=MODEL, dtype="float32", kv_cache_memory_bytes=16 << 20, warmup=False))
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)


def test_other_failures_of_the_device_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "assemble", failing("INTERNAL: the device is gone"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device is gone"):
        Engine(EngineConfig(model=MODEL))


def test_server_without_memory_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "assemble", failing(EXHAUSTED))
    assert cli.main(["--model", MODEL, "--port", "0"]) == 1
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("error: out of device memory while the engine started; lower --gpu-memory-utilization")
