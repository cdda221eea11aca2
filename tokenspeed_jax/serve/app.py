"""The application: routes, and the handlers of those that generate or tokenise."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.serve.access import ADMIN_PATHS, AccessCheck
from tokenspeed_jax.serve.admin import AdminRoutes
from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.bodies import parse_body, read_body
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.errors import (
    ApiError,
    model_not_found,
    on_api_error,
    on_http_error,
    on_unexpected_error,
    refusal,
)
from tokenspeed_jax.serve.extension import NO_EXTENSION, Extension
from tokenspeed_jax.serve.generation import DeltaBridge, Generation
from tokenspeed_jax.serve.metrics import ServerMetrics
from tokenspeed_jax.serve.openapi import OpenApiRoute
from tokenspeed_jax.serve.protocol.chat import ChatReply, ChatRequest
from tokenspeed_jax.serve.protocol.completions import CompletionReply, CompletionRequest
from tokenspeed_jax.serve.protocol.generate import GenerateReply, GenerateRequest
from tokenspeed_jax.serve.protocol.logprobs import TokenNames, check_num_prompt_logprobs
from tokenspeed_jax.serve.protocol.messages import CountTokensRequest, MessagesRequest
from tokenspeed_jax.serve.protocol.messages_reply import MessagesReply
from tokenspeed_jax.serve.protocol.reply import ReplyHead
from tokenspeed_jax.serve.protocol.responses import ResponsesRequest
from tokenspeed_jax.serve.protocol.responses_reply import ResponsesReply
from tokenspeed_jax.serve.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from tokenspeed_jax.serve.protocol.translation import TranslatedRequest
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.serve.request_log import RequestLog
from tokenspeed_jax.serve.served_engine import ServedEngine
from tokenspeed_jax.serve.status import StatusRoutes
from tokenspeed_jax.serve.status_page.routes import StatusPage
from tokenspeed_jax.serve.streaming import ClientGone, EventStream, StreamedReply, while_connected
from tokenspeed_jax.serve.tracing import RequestTracer
from tokenspeed_jax.text.template_sandbox import RenderingTooLong, brief_renderings

MAX_CHOICES = 2048
"""Most continuations (prompts x n) of one HTTP request."""

type AnyRequest = CompletionRequest | ChatRequest | GenerateRequest | ResponsesRequest | MessagesRequest
type AnyReply = CompletionReply | ChatReply | GenerateReply | ResponsesReply | MessagesReply

_JSON = "application/json"
_SHORT_BODY = 2048
"""Bytes that are made into a prompt within about a millisecond."""
_BRIEF_SECONDS = 0.003
"""Longest that the rendering of a short body may hold up the event loop."""
_CLIENT_CLOSED_REQUEST = 499


def create_app(
    engine: ServedEngine,
    config: ServerConfig,
    admission: Admission | None = None,
    extension: Extension = NO_EXTENSION,
) -> Starlette:
    """The ASGI application that serves `engine`; its lifespan must run (uvicorn sees to it).

    Args:
        admission: for those who end the server from outside; left out, the application makes its own.
        extension: what is served beside the server's own routes.
    """
    admission = admission or Admission(engine, config.max_queued_requests)
    server = ModelServer(engine, config, admission, extension)
    app = Starlette(
        routes=server.routes(),
        middleware=[
            *_cross_origin(config),
            Middleware(AccessCheck, config=config, admin_paths=ADMIN_PATHS | extension.paths),
        ],
        lifespan=lambda _app: server.running(),
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_error,
            Exception: on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


def _cross_origin(config: ServerConfig) -> list[Middleware]:
    """Outside of the check of keys: a browser asks without one whether it may send one."""
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    ]


class ModelServer:
    """The handlers of one engine's routes."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, admission: Admission, extension: Extension) -> None:
        self._engine = engine
        self._config = config
        self._admission = admission
        self._extension = extension
        self._name = config.served_model_name or engine.model_name
        self._created = int(time.time())
        self._names = TokenNames(engine.tokenizer)
        self._format = ReplyFormat(config, engine.tokenizer)
        self._log = RequestLog(config, engine.tokenizer)
        self._metrics = ServerMetrics(engine, self._name)
        tracer = None if config.trace_endpoint is None else RequestTracer(config.trace_endpoint, self._name)
        self.bridge = DeltaBridge(engine, self._metrics, admission, config.request_timeout, tracer)
        self._page = None if config.disable_status_page else StatusPage(engine, admission, self._metrics.recent)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What has to run beside the handlers, while the context lasts."""
        async with self.bridge.attached(), self._page.watching() if self._page else contextlib.nullcontext():
            yield

    def routes(self) -> list[Route]:
        """Every route of the server."""
        routes = self._served_routes()
        return [*routes, *OpenApiRoute(routes, self._extension).routes()]

    def _served_routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            *StatusRoutes(self._engine, self._config, self._admission, self._name).routes(),
            *AdminRoutes(self._engine, self._config, self.bridge).routes(),
            *self._extension.routes,
            *(self._page.routes() if self._page else ()),
        ]

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, CompletionRequest, CompletionReply, "cmpl-")

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        reply_type = partial(ChatReply, reply_format=self._format)
        return await self._generate(request, ChatRequest, reply_type, "chatcmpl-")

    async def responses(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        reply_type = partial(ResponsesReply, reply_format=self._format)
        return await self._generate(request, ResponsesRequest, reply_type, "resp_")

    async def messages(self, request: Request) -> Response:
        """`POST /v1/messages`."""
        reply_type = partial(MessagesReply, reply_format=self._format)
        response = await self._generate(request, MessagesRequest, reply_type, "msg_")
        if reply_id := response.headers.get("x-request-id"):
            response.headers["request-id"] = reply_id  # Anthropic's name for it
        return response

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""

        def reply(body: bytes) -> Response:
            _, prompts = self._prompts(parse_body(body, CountTokensRequest))
            return _json({"input_tokens": len(prompts[0])})

        return await self._off_the_loop(request, reply)

    async def generate(self, request: Request) -> Response:
        """`POST /generate`."""
        reply_type = partial(GenerateReply, incremental=self._config.incremental_streaming_output)
        return await self._generate(request, GenerateRequest, reply_type, "")

    async def models(self, _request: Request) -> Response:
        """`GET /v1/models`."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        self._check_model(request.path_params["name"])
        return _json(self._card())

    async def health(self, _request: Request) -> Response:
        """`GET /health`: 200 while the engine is well, asleep or not, and the server does not stop."""
        self._admission.check_serving()
        return _json({"status": "asleep" if self._engine.is_sleeping else "ok"})

    async def metrics(self, _request: Request) -> Response:
        """`GET /metrics`."""
        page = await run_in_threadpool(self._metrics.page)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""

        def reply(body: bytes) -> Response:
            tokenize = parse_body(body, TokenizeRequest)
            self._check_model(tokenize.model)
            return _json(tokenize.reply(self._engine.tokenizer, self._names, self._engine.max_model_len))

        return await self._off_the_loop(request, reply)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""

        def reply(body: bytes) -> Response:
            detokenize = parse_body(body, DetokenizeRequest)
            self._check_model(detokenize.model)
            return _json(detokenize.reply(self._engine.tokenizer))

        return await self._off_the_loop(request, reply)

    async def _off_the_loop[T](self, request: Request, work: Callable[[bytes], T]) -> T:
        """Reads the body, then parses, renders and tokenises on a worker thread: long prompts must not hold up
        the streams of others. Short ones take less time than the way to another thread and back, unless the template
        makes much of little; then it starts again over there."""
        body = await read_body(request, self._config.max_body_bytes)
        if len(body) <= _SHORT_BODY:
            with contextlib.suppress(RenderingTooLong), brief_renderings(_BRIEF_SECONDS):
                return work(body)
        return await run_in_threadpool(work, body)

    async def _generate(
        self,
        request: Request,
        body_type: type[AnyRequest],
        reply_type: Callable[..., AnyReply],
        id_prefix: str,
    ) -> Response:
        def prepare(body: bytes) -> tuple[AnyRequest, SamplingParams, list[list[int]]]:
            # `open` has the last word; this spares a full server the tokenising. It comes behind the reading of the
            # body, for a client that still sends would lose the reply.
            self._admission.check_room()
            parsed = parse_body(body, body_type)
            return parsed, *self._prompts(parsed)

        parsed, params, prompts = await self._off_the_loop(request, prepare)
        if params.structured_outputs is not None:
            await run_in_threadpool(self._compile, params.structured_outputs, parsed)
        is_native = isinstance(parsed, GenerateRequest)
        reply_id = (parsed.rid if is_native else None) or id_prefix + uuid.uuid4().hex
        if self._config.enable_log_requests:
            await run_in_threadpool(self._log.note, reply_id, prompts, params)
        head = ReplyHead(reply_id, self._name, int(time.time()), parsed.includes_usage)
        reply = reply_type(head, parsed, params, self._names)
        generation = self.bridge.open(
            prompts,
            params,
            request_id=reply_id,
            keeps_output=not parsed.stream and reply.keeps_choices,
            shows_aborts=is_native,
            renamed=parsed.names,
            priority=parsed.priority or 0,
            cache_salt=parsed.cache_salt,
            trace_headers=request.headers,
        )
        headers = {"x-request-id": reply_id}
        if parsed.stream:
            return EventStream(_events(generation, reply), reply.failure, generation.close, headers)
        with contextlib.closing(generation):
            try:
                choices = await while_connected(request.receive, generation.finish(reply.take))
            except ClientGone:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
        # What is told of whole prompts is too much to encode between two events of other streams.
        is_long = params.prompt_logprobs is not None or params.return_routed_experts
        body = await run_in_threadpool(reply.body, choices) if is_long else reply.body(choices)
        return Response(body, headers=headers, media_type=_JSON)

    def _prompts(self, parsed: AnyRequest | CountTokensRequest) -> tuple[SamplingParams, list[list[int]]]:
        """The request's parameters and the token ids of its prompts. Raises `ApiError` for whatever is wrong in it."""
        self._check_model(parsed.model)
        with _own_names(parsed):
            chat = parsed
            if isinstance(parsed, TranslatedRequest):
                parsed.fit(self._engine.tokenizer, self._format)
                chat = parsed.chat
            params = parsed.params()
            if isinstance(chat, ChatRequest):
                params = self._format.applied(params, chat.offered_tools, chat.forced_call)
            try:
                prompts = parsed.prompt_token_ids(self._engine.tokenizer)
            except InvalidRequest as error:
                raise refusal(error, parsed.names) from None
            if isinstance(chat, ChatRequest):
                params = self._format.constrained(params, chat, prompts[0])
        if len(prompts) * params.n > MAX_CHOICES:
            raise ApiError(
                f"{len(prompts)} prompts x n = {params.n} are more than {MAX_CHOICES} completions per request",
                param=parsed.names.get("prompt", "prompt"),
                code="invalid_value",
            )
        check_num_prompt_logprobs(prompts, params, parsed.names.get("prompt", "prompt"))
        return params, prompts

    def _compile(self, constraint: StructuredOutputsParams, parsed: AnyRequest) -> None:
        """Compiles what `open` would else compile on the event loop."""
        with _own_names(parsed):
            try:
                self._engine.compile_grammar(constraint)
            except InvalidRequest as error:
                raise refusal(error, parsed.names) from None

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._name:
            raise model_not_found(name, self._name)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokenspeed",
            "root": self._engine.model_name,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
        }


def _own_names(parsed: AnyRequest | CountTokensRequest) -> contextlib.AbstractContextManager[None]:
    """Errors raised within call fields by the names that the request's protocol has for them."""
    return parsed.own_names() if isinstance(parsed, TranslatedRequest) else contextlib.nullcontext()


async def _events(generation: Generation, reply: StreamedReply) -> AsyncIterator[bytes]:
    def grown(batch: list[tuple[int, RequestDelta]]) -> bytes:
        # What one step brought goes out in one piece: a write per event would cost more than the event.
        return b"".join([reply.growth(index, delta) for index, delta in batch])

    if opening := reply.opening():
        yield opening
    async for batch in generation.batches():
        is_long = any(delta.prompt_logprobs is not None or delta.routed_experts is not None for _, delta in batch)
        if growth := await run_in_threadpool(grown, batch) if is_long else grown(batch):
            yield growth
    yield reply.closing(generation.choices)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=_JSON)
