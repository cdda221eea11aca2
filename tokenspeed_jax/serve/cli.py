"""`main`: from the command line to a running server and back to a clean end."""

import dataclasses
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tokenspeed_jax.errors import CheckpointError, ConfigError, OutOfDeviceMemory
from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.connections import raise_file_limit
from tokenspeed_jax.serve.extension import NO_EXTENSION, Extension
from tokenspeed_jax.serve.http_server import ENGINE_FAILED, HttpServer
from tokenspeed_jax.serve.options import DESCRIPTION, PROG, option_name, parse_options
from tokenspeed_jax.serve.served_engine import ServedEngine

if TYPE_CHECKING:
    from tokenspeed_jax.engine.engine import Engine

_CLOSE_SECONDS = 20
"""Time for the engine to end its last step."""
_INTERRUPTED = 130


class ListenError(Exception):
    """The server cannot listen where it was told to; the message says why and what to change."""


def main(
    argv: Sequence[str] | None = None,
    prog: str = PROG,
    description: str = DESCRIPTION,
    extend: Callable[["Engine", ServerConfig], Extension] | None = None,
) -> int:
    """Runs the server until SIGINT or SIGTERM, or until its engine fails.

    Args:
        argv: the options (default: the process's own).
        prog: how the command is called, for the help.
        description: what the command is for, for the help.
        extend: makes, of the engine that was started, what is served beside the server's own routes.

    Returns:
        The exit code: 0 after a signal; 1 when the port is taken or the checkpoint cannot be used; 2 for an option
        that is wrong or does not fit the checkpoint or the machine; `ENGINE_FAILED` after a failed step.
    """
    engine_config, config = parse_options(argv, prog, description)
    # Only our own messages go down to the chosen level; libraries speak up from warnings on.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tokenspeed_jax").setLevel(config.log_level.upper())
    try:
        listener = bind(config)
    except ListenError as error:
        return _fail(str(error), 1)
    with listener:
        from tokenspeed_jax.engine.compilation_cache import default_cache_folder
        from tokenspeed_jax.engine.engine import Engine

        if engine_config.compilation_cache_dir is None:
            engine_config = dataclasses.replace(engine_config, compilation_cache_dir=default_cache_folder())
        try:
            engine = Engine(engine_config)
            try:
                return serve(engine, config, listener, extend(engine, config) if extend else NO_EXTENSION)
            finally:
                close(engine)
        except ConfigError as error:
            return _fail(f"argument {option_name(error.field)}: {error}" if error.field else str(error), 2)
        except (CheckpointError, ListenError, OutOfDeviceMemory) as error:
            return _fail(str(error), 1)
        except KeyboardInterrupt:
            return _INTERRUPTED


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


def serve(
    engine: ServedEngine, config: ServerConfig, listener: socket.socket, extension: Extension = NO_EXTENSION
) -> int:
    """Serves until a signal, after which running requests have `drain_timeout` to finish, or until the engine fails.

    Returns:
        0 after a signal, `ENGINE_FAILED` after a failure.

    Raises:
        ListenError: another process began to listen on the port in the meantime.
    """
    raise_file_limit(config.max_connections)
    admission = Admission(engine, config.max_queued_requests)
    app = create_app(engine, config, admission, extension)
    server = HttpServer(app, config, admission, announcement(engine, config, listener))
    try:
        server.run(sockets=[listener])
    except OSError as error:
        raise _cannot_listen(config, error) from None
    return server.exit_code


class Closable(Protocol):
    """An engine, as far as ending it goes."""

    def close(self) -> None: ...


def close(engine: Closable, seconds: float = _CLOSE_SECONDS) -> None:
    """Closes the engine. A step that does not come back from the device in time ends the process: it would hold it
    for ever otherwise."""
    watchdog = threading.Timer(seconds, os._exit, (ENGINE_FAILED,))
    watchdog.daemon = True
    watchdog.start()
    engine.close()
    watchdog.cancel()


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
