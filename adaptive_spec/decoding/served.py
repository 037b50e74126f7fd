"""The releases that a decoder runs: the live one and, while there is one, a canary beside it.

A request's id and the canary's version decide by hash which of the two drafts for it, so any decoder decides alike and
every canary asks other requests.  Of the engine's thread.  Thresholds that a person has set lie above those of either.
"""

from hashlib import blake2b

from adaptive_spec.core import Release, Thresholds
from adaptive_spec.decoding.overrides import Overrides
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.drafting.memory import Survivals
from adaptive_spec.errors import ReleaseError
from adaptive_spec.models.weights import Draft, Drafts
from adaptive_spec.releases.trip import TripWire


def bucket(request_id: str, version: int) -> float:
    """Return where in [0, 1) a request lies for the canary of a version; it takes part below the canary's share."""
    digest = blake2b(f"{version}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


class Served:
    """One release in service: its drafts, and how chains of its draft model have fared here."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self.survivals = Survivals()

    @property
    def release(self) -> Release:
        return self.drafts.release


class Lineup:
    """The live release, and the canary with the share of requests that it serves."""

    def __init__(self, live: Drafts) -> None:
        self.live = Served(live)
        self.canary: Served | None = None
        self.share = 0.0
        self.wire: TripWire | None = None
        self.overrides = Overrides()

    @property
    def releases(self) -> tuple[Release, ...]:
        """Those in service, the live one first."""
        return tuple(served.release for served in (self.live, self.canary) if served is not None)

    def release_for(self, request_id: str) -> Release:
        """The release that serves a new request."""
        canary = self.canary
        takes_part = canary is not None and bucket(request_id, canary.release.version) < self.share
        return canary.release if canary is not None and takes_part else self.live.release

    def of(self, release: Release) -> Served:
        """The canary, if it is that one, else what is live: a release that was ended is served by its successor."""
        return self.canary if self.canary is not None and self.canary.release is release else self.live

    def draft_of(self, slot: Slot) -> Draft:
        """The draft that proposes for a row."""
        return self.of(slot.release).drafts.of(slot.adapter)

    def thresholds_of(self, slot: Slot) -> Thresholds:
        """The numbers that a row is drafted under: its release's, or what a person has set in their place."""
        thresholds, override = slot.release.for_domain(slot.request.domain), self.overrides.of(slot.request.domain)
        return thresholds if override is None else override.over(thresholds)

    def swap(self, drafts: Drafts) -> None:
        """Put a release live.  A canary of the same version has come to its end."""
        if self.canary is not None and self.canary.release.version == drafts.release.version:
            self.end(promote=False)
        self.live = Served(drafts)

    def begin(self, drafts: Drafts, share: float) -> None:
        """Let a release serve a share of the requests to come, in place of a canary that runs.

        Raises:
            ReleaseError: it is live already.
        """
        version = drafts.release.version
        if version == self.live.release.version:
            raise ReleaseError(f"Release {version} is live already; it cannot be tried. Publish another.")
        self.canary, self.share, self.wire = Served(drafts), share, TripWire(version)

    def end(self, *, promote: bool) -> None:
        """End the canary: it becomes the live release, or goes."""
        if promote and self.canary is not None:
            self.live = self.canary
        self.canary, self.share, self.wire = None, 0.0, None
