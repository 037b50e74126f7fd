"""The OpenAI-compatible routes.  They turn bodies into requests and deltas into chunks; the engine does the rest.

A stream blocks between deltas, so each is read in a thread, of a pool of its own: waiting completions never starve
the control routes.  A client that goes away cancels its request.
"""

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Header
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from adaptive_spec.core import Request
from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.serving.bodies import ChatBody, CompletionBody, GenerationBody, to_request
from adaptive_spec.serving.ports import Delta, Service, Stream, Usage
from adaptive_spec.serving.problems import envelope, status_of

logger = logging.getLogger(__name__)

Domain = Annotated[str | None, Header(alias="X-Domain")]
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
BROKEN = ("cancelled", "error")  # finish reasons that OpenAI clients do not know


def openai_router(service: Service) -> APIRouter:
    """Collect the OpenAI routes of a service."""
    router = APIRouter(prefix="/v1")
    decoder = service.settings.decoder
    threads = anyio.CapacityLimiter(decoder.slots + decoder.queue_limit)
    started = int(time.time())
    served = service.settings.model.target

    def card() -> dict[str, Any]:
        return {"id": served, "object": "model", "created": started, "owned_by": "adaptive-spec"}

    @router.get("/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @router.get("/models/{model:path}")
    def model(model: str) -> dict[str, Any]:
        if model != served:
            raise HTTPException(404, f"Model {model!r} is not served here. Use {served!r}.")
        return card()

    @router.post("/completions")
    async def completions(body: CompletionBody, http: HttpRequest, x_domain: Domain = None) -> Response:
        return await _answer(service, body, x_domain, http, threads, _completion_choice, "text_completion")

    @router.post("/chat/completions")
    async def chat_completions(body: ChatBody, http: HttpRequest, x_domain: Domain = None) -> Response:
        return await _answer(service, body, x_domain, http, threads, _message_choice, "chat.completion")

    return router


class _EventStream(StreamingResponse):
    """Server-sent events that cancel their stream however they end; an abandoned generator would close late."""

    def __init__(self, parts: AsyncIterator[str], stream: Stream) -> None:
        super().__init__(parts, media_type="text/event-stream", headers=SSE_HEADERS)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()


async def _answer(
    service: Service,
    body: CompletionBody | ChatBody,
    header_domain: str | None,
    http: HttpRequest,
    threads: anyio.CapacityLimiter,
    choice: Callable[[str, str | None], dict[str, Any]],
    kind: str,
) -> Response:
    served = service.settings.model.target
    if body.model not in (None, "", served):
        message = f"Model {body.model!r} is not served here. Use {served!r}."
        return JSONResponse(envelope(message, "not_found_error", "model_not_found", "model"), 404)

    def submit() -> tuple[Request, Stream]:
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        request = to_request(body, header_domain, service.tokenizer, service.settings, prefix)
        return request, service.engine.submit(request)

    request, stream = await anyio.to_thread.run_sync(submit)
    head = {"id": request.request_id, "object": kind, "created": int(time.time()), "model": served}
    if body.stream:
        parts = _chunks(stream, head, request, body, threads)
        return _EventStream(parts, stream)
    return await _whole(stream, head, request, http, threads, choice)


async def _whole(
    stream: Stream,
    head: dict[str, Any],
    request: Request,
    http: HttpRequest,
    threads: anyio.CapacityLimiter,
    choice: Callable[[str, str | None], dict[str, Any]],
) -> Response:
    texts: list[str] = []
    last: Delta | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_gone, http, stream)
        try:
            async for delta in _deltas(stream, threads):
                texts.append(delta.text)
                last = delta
        except Exception as error:
            # Answered here: out of a task group it would arrive wrapped in an ExceptionGroup.
            return _failed(error)
        finally:
            group.cancel_scope.cancel()
    if last is None or last.usage is None or last.finish_reason in (None, *BROKEN):
        return JSONResponse(
            envelope("The request ended before its answer was whole. Send it again.", "server_error"), 500
        )
    answer = choice("".join(texts), last.finish_reason)
    return JSONResponse({**head, "choices": [answer], "usage": usage(last.usage), **_speculation(request, last.usage)})


async def _chunks(
    stream: Stream,
    head: dict[str, Any],
    request: Request,
    body: GenerationBody,
    threads: anyio.CapacityLimiter,
) -> AsyncIterator[str]:
    chat = head["object"] == "chat.completion"
    if chat:
        head = {**head, "object": "chat.completion.chunk"}
        yield _event({**head, "choices": [_delta_choice("", None, first=True)]})
    make = _delta_choice if chat else _completion_choice
    spent: Usage | None = None
    try:
        async for delta in _deltas(stream, threads):
            if delta.finish_reason in BROKEN:
                yield _event(envelope("The request ended before its answer was whole. Send it again.", "server_error"))
                return
            if delta.text or delta.finish_reason:
                yield _event({**head, "choices": [make(delta.text, delta.finish_reason)]})
            spent = delta.usage or spent
    except Exception as error:
        # The status line is gone; an error event is all that is left, and clients raise on it.
        yield _event(json.loads(bytes(_failed(error).body)))
        return
    if spent and body.stream_options and body.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": usage(spent), **_speculation(request, spent)})
    yield "data: [DONE]\n\n"


async def _deltas(stream: Stream, threads: anyio.CapacityLimiter) -> AsyncIterator[Delta]:
    events = iter(stream.events())
    try:
        while True:
            # Abandoned on cancellation: the thread ends by itself once the stream below is cancelled.
            delta = await anyio.to_thread.run_sync(_next, events, limiter=threads, abandon_on_cancel=True)
            if delta is None:
                return
            yield delta
    finally:
        stream.cancel()


def _next(events: Iterator[Delta]) -> Delta | None:
    return next(events, None)


async def _cancel_when_gone(http: HttpRequest, stream: Stream) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


def _failed(error: Exception) -> JSONResponse:
    if isinstance(error, AdaptiveSpecError):
        status, kind = status_of(error)
        return JSONResponse(envelope(str(error), kind), status)
    logger.error("A stream broke", exc_info=error)
    return JSONResponse(envelope("Internal error; see the service's log.", "server_error"), 500)


def usage(spent: Usage) -> dict[str, Any]:
    """The usage object; proposed tokens are reported as OpenAI reports predicted ones."""
    return {
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "total_tokens": spent.prompt_tokens + spent.completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": spent.num_accepted_draft_tokens,
            "rejected_prediction_tokens": spent.num_draft_tokens - spent.num_accepted_draft_tokens,
        },
    }


def _speculation(request: Request, spent: Usage) -> dict[str, Any]:
    summary = {"domain": request.domain, "releases": list(spent.releases), "num_spec_steps": spent.num_steps}
    return {"speculation": summary}


def _completion_choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _message_choice(text: str, reason: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}


def _delta_choice(text: str, reason: str | None, first: bool = False) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""} if first else {"content": text} if text else {}
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def _event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"
