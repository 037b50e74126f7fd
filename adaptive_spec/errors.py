"""Every error a user can meet.  The tree:

AdaptiveSpecError
├── SettingsError         a setting is missing, contradictory or out of range
├── ModelError            a model, draft or tokenizer cannot be loaded, fetched or paired
├── RequestError          a request's parameters are wrong (HTTP 400)
├── BusyError             the queue is full; try again later (HTTP 429)
│   └── RateLimitError    the client, or all together, ask for more than `limits` allow
├── UnavailableError      the service stops, or memory ran out (HTTP 503)
├── DeadlineError         the service's time for a request was up before its answer was whole (HTTP 504)
│   └── OwnDeadlineError  the one that the client had set (HTTP 408)
├── DecodingError         decoding a request failed (HTTP 500)
├── NotLeaderError        another process leads; this one cannot do what was asked (HTTP 409)
├── OrderConflict         another order has the same idempotency key, or the same one is under way (HTTP 409)
├── RecordsError          the database cannot be used as it is
├── NotEnoughDataError    a fit or a run was asked for before its data exists
├── ReleaseError          a release is damaged, foreign, refused or unknown
│   └── GateRefused       the candidate did not pass the gate; carries the report
└── RunError              a training run failed
    ├── RunDeclined       none can begin now; says why
    └── RunInterrupted    its process was killed or the service stopped; it may go on from its checkpoint

Messages end with what to do next.
"""


class AdaptiveSpecError(Exception):
    """Base of all errors raised on purpose."""


class SettingsError(AdaptiveSpecError):
    """A setting is missing, contradictory or out of range."""


class ModelError(AdaptiveSpecError):
    """A model, draft or tokenizer cannot be loaded, fetched or paired."""


class RequestError(AdaptiveSpecError):
    """A request's parameters are wrong."""


class BusyError(AdaptiveSpecError):
    """The engine's queue is full; ``retry_after_seconds`` says when to try again."""

    retry_after_seconds = 1.0


class RateLimitError(BusyError):
    """The client, or all together, ask for more than the limits allow."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UnavailableError(AdaptiveSpecError):
    """The service cannot answer now: it stops, or memory ran out."""


class DeadlineError(AdaptiveSpecError):
    """The request's time was up before its answer was whole."""


class OwnDeadlineError(DeadlineError):
    """It was the time that the client had set, so no fault of the service."""


class DecodingError(AdaptiveSpecError):
    """Decoding a request failed."""


class NotLeaderError(AdaptiveSpecError):
    """Another process leads; this one cannot do what was asked."""


class OrderConflict(AdaptiveSpecError):
    """An idempotency key belongs to another order, or to one that is under way."""


class RecordsError(AdaptiveSpecError):
    """The database cannot be used as it is."""


class NotEnoughDataError(AdaptiveSpecError):
    """A fit or a run was asked for before its data exists."""


class ReleaseError(AdaptiveSpecError):
    """A release is damaged, foreign, refused or unknown."""


class GateRefused(ReleaseError):
    """The candidate did not pass the gate."""


class RunError(AdaptiveSpecError):
    """A training run failed."""


class RunDeclined(RunError):
    """No training run can begin now, for ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Not now, because {reason}.")
        self.reason = reason


class RunInterrupted(RunError):
    """The run's process ended before its work was done."""
