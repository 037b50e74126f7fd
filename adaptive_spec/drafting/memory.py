"""What is known of each domain while decoding: past outputs, and how chains of each drafter fared.

N-grams live on from release to release; how far chains of a draft model get is counted anew under each.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from adaptive_spec.core import Release, Thresholds
from adaptive_spec.drafting.ngram import AcceptanceByMatch, Match, OutputStore, SuffixIndex
from adaptive_spec.drafting.survival import SurvivalCounter
from adaptive_spec.settings import DecoderSettings

_MOST_DOMAINS = 64  # remembered; the one least recently served makes room

Memory = TypeVar("Memory")


class DomainMemory:
    """Of one domain."""

    def __init__(self, settings: DecoderSettings, thresholds: Thresholds) -> None:
        self.store = OutputStore(settings.ngram_min_match, longest_match(settings), settings.ngram_store_tokens)
        self.acceptance = AcceptanceByMatch()
        for seen in thresholds.ngram_acceptance:
            self.acceptance.add(seen.match_length, seen.num_accepted, seen.num_reached)

    def propose(self, own: SuffixIndex, limit: int) -> Match:
        """Return the chain of the longer match; the request's own text wins a tie."""
        here, before = own.propose(limit), self.store.propose(own.suffix(), limit)
        found = before if before.match_length > here.match_length else here
        return replace(found, rate=self.acceptance.rate(found.match_length))


class Memories:
    """The n-gram memory of each domain."""

    def __init__(self, settings: DecoderSettings) -> None:
        self._settings = settings
        self._release = Release()
        self._domains: OrderedDict[str, DomainMemory] = OrderedDict()

    def __getitem__(self, domain: str) -> DomainMemory:
        return _recalled(self._domains, domain, lambda: DomainMemory(self._settings, self._release.for_domain(domain)))

    def begin_with(self, release: Release) -> None:
        """Let domains to come begin with what a release tells of n-grams."""
        self._release = release


class Survivals:
    """How far chains of one release's draft model get, by domain and over all."""

    def __init__(self) -> None:
        self.pooled = SurvivalCounter()
        self._domains: OrderedDict[str, SurvivalCounter] = OrderedDict()

    def __getitem__(self, domain: str) -> SurvivalCounter:
        return _recalled(self._domains, domain, SurvivalCounter)

    def add(self, domain: str, chain_length: int, num_accepted: int) -> None:
        """Count one chain of a length that was fixed beforehand."""
        for counter in (self[domain], self.pooled):
            counter.add(chain_length, num_accepted)


def _recalled(domains: OrderedDict[str, Memory], domain: str, make: Callable[[], Memory]) -> Memory:
    """What is held of a domain, made where there is nothing; of too many the one least recently asked for goes."""
    if domain not in domains:
        domains[domain] = make()
        if len(domains) > _MOST_DOMAINS:
            domains.popitem(last=False)
    domains.move_to_end(domain)
    return domains[domain]


def longest_match(settings: DecoderSettings) -> int:
    """The longest suffix that is looked up."""
    return max(settings.ngram_min_match, settings.ngram_max_match)
