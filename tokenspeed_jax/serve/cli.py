"""`main`: from the command line to a running server and back to a clean end."""

import json
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvicorn

from tokenspeed_jax.errors import CheckpointError, ConfigError
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.options import option_name, parse_options
from tokenspeed_jax.serve.served_engine import ServedEngine

_KEEP_ALIVE_SECONDS = 75
_INTERRUPTED = 130


class ListenError(Exception):
    """The server cannot listen where it was told to; the message says why and what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until SIGINT or SIGTERM.

    Returns:
        The exit code: 0 after a signal; 1 when the port is taken or the checkpoint cannot be used; 2 for an option
        that is wrong or does not fit the checkpoint or the machine.
    """
    engine_config, config = parse_options(argv)
    # Only our own messages go down to the chosen level; libraries speak up from warnings on.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tokenspeed_jax").setLevel(config.log_level.upper())
    try:
        listener = bind(config)
    except ListenError as error:
        return _fail(str(error), 1)
    with listener:
        from tokenspeed_jax.engine.engine import Engine

        try:
            with Engine(engine_config) as engine:
                serve(engine, config, listener)
        except ConfigError as error:
            return _fail(f"argument {option_name(error.field)}: {error}" if error.field else str(error), 2)
        except (CheckpointError, ListenError) as error:
            return _fail(str(error), 1)
        except KeyboardInterrupt:
            return _INTERRUPTED
    return 0


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address, not listening yet: before the model is loaded, clients are
    refused at once instead of left waiting.

    Raises:
        ListenError: the host does not resolve, or the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ListenError(f"--host {config.host}: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from None
    return listener


def _cannot_listen(config: ServerConfig, error: OSError) -> ListenError:
    reason = error.strerror or str(error)
    return ListenError(f"--port {config.port}: cannot listen on {config.host}: {reason}; choose another port or host")


def serve(engine: ServedEngine, config: ServerConfig, listener: socket.socket) -> None:
    """Serves until a signal; running requests then have `shutdown_grace_seconds` to finish.

    Raises:
        ListenError: another process began to listen on the port in the meantime.
    """
    server = AnnouncingServer(
        uvicorn.Config(
            create_app(engine, config),
            log_config=None,
            access_log=config.access_log,
            log_level=config.log_level,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=config.shutdown_grace_seconds,  # pyright: ignore[reportArgumentType]
        ),
        announcement(engine, config, listener),
    )
    # uvicorn raises the signal that stopped it once more when it is done, to whoever handled it before; the engine
    # still has to be closed then.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    except OSError as error:
        raise _cannot_listen(config, error) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class AnnouncingServer(uvicorn.Server):
    """Prints `announcement` once it accepts connections."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)


def announcement(engine: ServedEngine, config: ServerConfig, listener: socket.socket) -> str:
    """The URL and a command that tries it."""
    port = listener.getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    body: dict[str, object] = {"model": config.served_model_name or engine.model_name}
    if engine.tokenizer.has_chat_template:
        route = "chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        route = "completions"
        body["prompt"] = "The capital of France is"
    body |= {"max_tokens": 32, "temperature": 0}
    text = json.dumps(body).replace("'", "'\\''")
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    return f"Ready: {url}\nTry:   curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{text}'"
