"""A request's deltas as an asynchronous iterator: from the step loop's thread to an event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable

from tokenspeed_jax.engine.assembly import Assembly
from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.prompts import Prompt, as_token_ids
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.sampling_params import SamplingParams


async def delta_stream(
    assembly: Assembly,
    prompt: Prompt,
    params: SamplingParams,
    options: RequestOptions,
    request_id: str | None,
    abort: Callable[[str], None],
) -> AsyncIterator[RequestDelta]:
    """Submits one request when it is first asked for a delta; see `Engine.stream`.

    Args:
        abort: `Engine.abort`, for a request whose deltas nobody takes any more.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[RequestDelta] = asyncio.Queue()

    def push(delta: RequestDelta) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, delta)
        except RuntimeError:  # the loop was closed, as by an interrupt: nobody is left to tell
            abort(delta.request_id)

    token_ids = await asyncio.to_thread(as_token_ids, prompt, assembly.source.tokenizer)
    if params.structured_outputs is not None:
        await asyncio.to_thread(assembly.grammars.compile, params.structured_outputs)
    request_id = assembly.intake.submit(token_ids, params, options, request_id, push)
    running = params.n
    try:
        while running:
            delta = await queue.get()
            running -= delta.finish_reason is not None
            if delta.finish_reason == "error":
                assembly.lifecycle.explain_cut({"error"})
            yield delta
    finally:
        if running:
            abort(request_id)
