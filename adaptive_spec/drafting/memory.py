"""What is known of each domain while decoding: past outputs, and how chains of each drafter fared."""

from collections import OrderedDict
from dataclasses import replace

from adaptive_spec.core import Release, Thresholds
from adaptive_spec.drafting.ngram import AcceptanceByMatch, Match, OutputStore, SuffixIndex
from adaptive_spec.drafting.survival import SurvivalCounter
from adaptive_spec.settings import DecoderSettings

_MOST_DOMAINS = 64  # remembered; the one least recently served makes room


class DomainMemory:
    """Of one domain."""

    def __init__(self, settings: DecoderSettings, thresholds: Thresholds) -> None:
        self.store = OutputStore(settings.ngram_min_match, longest_match(settings), settings.ngram_store_tokens)
        self.acceptance = AcceptanceByMatch()
        for seen in thresholds.ngram_acceptance:
            self.acceptance.add(seen.match_length, seen.num_accepted, seen.num_reached)
        self.survival = SurvivalCounter()  # of the draft model, under the live release

    def propose(self, own: SuffixIndex, limit: int) -> Match:
        """Return the chain of the longer match; the request's own text wins a tie."""
        here, before = own.propose(limit), self.store.propose(own.suffix(), limit)
        found = before if before.match_length > here.match_length else here
        return replace(found, rate=self.acceptance.rate(found.match_length))


class Memories:
    """The memory of each domain."""

    def __init__(self, settings: DecoderSettings) -> None:
        self._settings = settings
        self._release = Release()
        self.survival = SurvivalCounter()  # of all domains together
        self._domains: OrderedDict[str, DomainMemory] = OrderedDict()

    def __getitem__(self, domain: str) -> DomainMemory:
        if domain not in self._domains:
            self._domains[domain] = DomainMemory(self._settings, self._release.for_domain(domain))
            if len(self._domains) > _MOST_DOMAINS:
                self._domains.popitem(last=False)
        self._domains.move_to_end(domain)
        return self._domains[domain]

    def draft_changed(self, release: Release) -> None:
        """Forget how the draft model fared: it has other weights now.

        Domains to come begin with what the release tells of n-grams.
        """
        self._release = release
        self.survival = SurvivalCounter()
        for memory in self._domains.values():
            memory.survival = SurvivalCounter()


def longest_match(settings: DecoderSettings) -> int:
    """The longest suffix that is looked up."""
    return max(settings.ngram_min_match, settings.ngram_max_match)
