"""This process on the list of all: a sign of life now and then, and off the list at an orderly end."""

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta

from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.records.database import Database
from adaptive_spec.records.decoders import Sign, forget_gone, give_sign, withdraw
from adaptive_spec.settings import ClusterSettings

logger = logging.getLogger(__name__)


class Membership:
    """Gives signs of life from a thread of its own.

    Args:
        url: where this process answers HTTP.
        version: of the package.
        release, leads: asked at each sign.
    """

    def __init__(
        self,
        database: Database,
        settings: ClusterSettings,
        *,
        url: str,
        version: str,
        hashes: Mapping[str, str],
        release: Callable[[], int],
        leads: Callable[[], bool],
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.last_sign: float | None = None  # when one last reached the database, in seconds since the epoch
        self._database = database
        self._settings = settings
        self._url, self._version, self._hashes = url, version, dict(hashes)
        self._release, self._leads = release, leads
        self._due = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        """Give the first sign, then one every ``heartbeat_seconds``."""
        self._give_sign()
        self._thread.start()

    def tell(self) -> None:
        """Give a sign now: what it says has changed."""
        self._due.set()

    def stop(self) -> None:
        """End the thread and leave the list.  Where the database is away, others see in time that nobody is here."""
        self._stopping = True
        self._due.set()
        if self._thread.ident is None:
            return
        self._thread.join()
        try:
            withdraw(self._database, self.id)
        except SQLAlchemyError as error:
            logger.warning("this process stays on the list of decoders until it is forgotten: %s", error)

    def _run(self) -> None:
        told = False
        while True:
            self._due.wait(self._settings.heartbeat_seconds)
            self._due.clear()
            if self._stopping:
                return
            try:
                self._give_sign()
                told = False
            except SQLAlchemyError as error:
                if not told:
                    logger.warning("no sign of life can be given, it is tried again: %s", error)
                told = True

    def _give_sign(self) -> None:
        leads = self._leads()
        give_sign(
            self._database,
            Sign(
                id=self.id,
                host=socket.gethostname(),
                pid=os.getpid(),
                role=self._settings.role,
                url=self._url,
                version=self._version,
                release=self._release(),
                hashes=self._hashes,
                leads=leads,
            ),
        )
        self.last_sign = time.time()
        if leads:
            forget_gone(self._database, timedelta(hours=self._settings.forget_hours))
