"""The OpenAI-compatible routes.  They turn bodies into requests and deltas into chunks; the engine does the rest.

A stream blocks between deltas, so each is read in a thread, of a pool of its own: waiting completions never starve
the control routes.  A client that goes away cancels its request.
"""

import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Annotated, Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Header
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from adaptive_spec.core import Request
from adaptive_spec.errors import AdaptiveSpecError, DecodingError
from adaptive_spec.serving.bodies import ChatBody, CompletionBody, GenerationBody, to_request
from adaptive_spec.serving.choices import ChatChoices, CompletionChoices, summary
from adaptive_spec.serving.ports import Delta, Service, Stream, Usage
from adaptive_spec.serving.problems import Problem, answer_of, described, envelope

logger = logging.getLogger(__name__)

Domain = Annotated[str | None, Header(alias="X-Domain")]
SSE = "text/event-stream"
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "the answer; with `stream`, its chunks as server-sent events", "content": {SSE: {}}},
    408: {"model": Problem, "description": "the request's own `deadline_seconds` passed"},
}
BROKEN = ("cancelled", "deadline", "error")  # finish reasons that OpenAI clients do not know
UNFINISHED = "The request ended before its answer was whole. Send it again."


def openai_router(service: Service) -> APIRouter:
    """Collect the OpenAI routes of a service."""
    router = APIRouter(prefix="/v1", responses=described(404, 429))
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

    @router.post("/completions", responses=ANSWERS)
    async def completions(body: CompletionBody, http: HttpRequest, x_domain: Domain = None) -> Response:
        return await _answer(service, body, x_domain, http, threads, CompletionChoices(service.tokenizer))

    @router.post("/chat/completions", responses=ANSWERS)
    async def chat_completions(body: ChatBody, http: HttpRequest, x_domain: Domain = None) -> Response:
        return await _answer(service, body, x_domain, http, threads, ChatChoices(service.tokenizer))

    return router


class _EventStream(StreamingResponse):
    """Server-sent events that cancel their stream however they end; an abandoned generator would close late."""

    def __init__(self, parts: AsyncIterator[str], stream: Stream) -> None:
        super().__init__(parts, media_type=SSE, headers=SSE_HEADERS)
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
    choices: CompletionChoices | ChatChoices,
) -> Response:
    served = service.settings.model.target
    if body.model not in (None, "", served):
        message = f"Model {body.model!r} is not served here. Use {served!r}."
        return JSONResponse(envelope(message, "not_found_error", "model_not_found", "model"), 404)

    def submit() -> tuple[Request, Stream]:
        request = to_request(body, header_domain, service.tokenizer, service.settings, choices.prefix)
        if service.telemetry.spans.on:
            request = replace(request, traceparent=http.headers.get("traceparent", ""))
        return request, service.engine.submit(request)

    request, stream = await anyio.to_thread.run_sync(submit)
    http.state.spend(len(request.prompt_ids))
    http.state.domain, http.state.completion_id = request.domain, request.request_id  # for the access log
    head = {"id": request.request_id, "object": choices.kind, "created": int(time.time()), "model": served}
    if body.stream:
        parts = _chunks(stream, {**head, "object": choices.chunk_kind}, request, body, http, threads, choices)
        return _EventStream(parts, stream)
    return await _whole(stream, head, request, http, threads, choices)


async def _whole(
    stream: Stream,
    head: dict[str, Any],
    request: Request,
    http: HttpRequest,
    threads: anyio.CapacityLimiter,
    choices: CompletionChoices | ChatChoices,
) -> Response:
    deltas: list[list[Delta]] = [[] for _ in range(request.params.n)]
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_gone, http, stream)
        try:
            async for delta in _deltas(stream, http, threads):
                deltas[delta.index].append(delta)
                if delta.finish_reason in BROKEN:
                    return _failed(delta.error or DecodingError(UNFINISHED))
        except Exception as error:
            # Answered here: out of a task group it would arrive wrapped in an ExceptionGroup.
            return _failed(error)
        finally:
            stream.cancel()
            group.cancel_scope.cancel()
    answers = [
        choices.whole(
            index,
            "".join(delta.text for delta in own),
            own[-1].finish_reason,
            None if request.params.logprobs is None else [entry for delta in own for entry in delta.log_probs],
        )
        for index, own in enumerate(deltas)
    ]
    spent = [delta.usage for own in deltas for delta in own if delta.usage]
    return JSONResponse({**head, "choices": answers, **summary(request, spent)})


async def _chunks(
    stream: Stream,
    head: dict[str, Any],
    request: Request,
    body: GenerationBody,
    http: HttpRequest,
    threads: anyio.CapacityLimiter,
    choices: CompletionChoices | ChatChoices,
) -> AsyncIterator[str]:
    for index in range(request.params.n):
        if (opening := choices.opening(index)) is not None:
            yield _event({**head, "choices": [opening]})
    spent: list[Usage] = []
    try:
        async for delta in _deltas(stream, http, threads):
            if delta.finish_reason in BROKEN:
                yield _error_event(delta.error or DecodingError(UNFINISHED))
                return
            if delta.text or delta.finish_reason or delta.log_probs:
                entries = None if request.params.logprobs is None else delta.log_probs
                piece = choices.piece(delta.index, delta.text, delta.finish_reason, entries)
                yield _event({**head, "choices": [piece]})
            spent += [delta.usage] if delta.usage else []
    except Exception as error:
        # The status line is gone; an error event is all that is left, and clients raise on it.
        yield _error_event(error)
        return
    if spent and body.stream_options and body.stream_options.include_usage:
        yield _event({**head, "choices": [], **summary(request, spent)})
    yield "data: [DONE]\n\n"


async def _deltas(stream: Stream, http: HttpRequest, threads: anyio.CapacityLimiter) -> AsyncIterator[Delta]:
    events = iter(stream.events())
    try:
        while True:
            # Abandoned on cancellation: the thread ends by itself once the stream below is cancelled.
            delta = await anyio.to_thread.run_sync(_next, events, limiter=threads, abandon_on_cancel=True)
            if delta is None:
                return
            http.state.spend(len(delta.token_ids))
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
        return answer_of(error)
    logger.error("A stream broke", exc_info=error)
    return JSONResponse(envelope("Internal error; see the service's log.", "server_error"), 500)


def _error_event(error: Exception) -> str:
    return _event(json.loads(bytes(_failed(error).body)))


def _event(payload: dict[str, Any]) -> str:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n"
