"""Serving until a signal, then an orderly end: running requests finish or are told why they did not."""

import gc
import math
import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI

from adaptive_spec.serving.ports import Service

_ANSWER_SECONDS = 5  # to send what draining has ended


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First, so that requests end by themselves while the server waits for them.
        self._service.drain()
        await super().shutdown(sockets)


def run(app: FastAPI, service: Service) -> None:
    """Serve until SIGINT or SIGTERM has come and what ran has been answered.  Lines are logged as all others are."""
    config = uvicorn.Config(
        app,
        host=service.settings.server.host,
        port=service.settings.server.port,
        log_config=None,
        access_log=False,  # see ``access``
        timeout_graceful_shutdown=math.ceil(service.settings.decoder.drain_seconds) + _ANSWER_SECONDS,
    )
    server = _Server(config, service)
    gc.collect()
    gc.freeze()  # models and libraries stay: a full collection, which stops every thread, need not look at them again
    try:
        server.run()
    except KeyboardInterrupt:
        return
    if not server.started:
        sys.exit(1)


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an orderly exit.  uvicorn raises it once more when it is done, and by default that would end
    the process before its records are written."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
