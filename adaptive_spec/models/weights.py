"""The drafts of releases: base weights plus low-rank updates, and a head of the tokens that traffic uses.

The base is never changed.  A draft under an adapter is a copy of it, with tensors of its own where the adapter changes
something and the base's everywhere else, so that it costs the memory of those.  Copies are written while nobody drafts
with them: on any thread, beside a decoder that goes on, which then exchanges references.  A copy whose draft nobody
holds any more is written again for the next release: its tensors stay where they are for whoever holds on to them (a
captured graph), and memory does not grow with the number of swaps.
"""

import copy
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaptive_spec.core import Release
from adaptive_spec.errors import ReleaseError

Deltas = Mapping[str, Tensor]  # parameter name -> dense low-rank update, of the parameter's shape


@dataclass(frozen=True, slots=True)
class LoadedRelease:
    """A release with what it changes of the draft.

    deltas: of the shared adapter; empty for the base draft.  own: of adapters that domains have for themselves, by
    domain; each stands for itself, not on top of the shared one.
    """

    release: Release = field(default_factory=Release)
    deltas: Deltas = field(default_factory=lambda: MappingProxyType({}))
    own: Mapping[str, Deltas] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Draft:
    """A model whose weights nobody changes while somebody holds this.

    name: a digest of what it changes of the base, empty for the base; equal names mean equal weights.
    """

    model: PreTrainedModel
    name: str


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class TrimmedHead:
    """The rows of the head that belong to some tokens.

    Lossless: tokens without a row have draft probability 0, and rejection sampling holds for any draft distribution.
    """

    head: nn.Linear
    token_ids: Tensor  # [tokens], ascending


@dataclass(frozen=True, slots=True)
class Drafts:
    """A release that is ready to draft.  ``shared`` serves every domain without one of its own."""

    release: Release
    shared: Draft
    own: Mapping[str, Draft]
    trimmed: TrimmedHead | None

    def of(self, domain: str) -> Draft:
        """The draft that serves a domain."""
        return self.own.get(domain, self.shared)

    @property
    def head(self) -> nn.Module | None:
        """What stands in for the draft's head: the rows of the trimmed vocabulary."""
        return None if self.trimmed is None else self.trimmed.head


class DraftWeights:
    """Makes drafts out of the base and updates.  Safe between threads."""

    def __init__(self, draft: PreTrainedModel) -> None:
        self.base = draft
        self._untouched = Draft(draft, "")
        self._parameters = dict(draft.named_parameters())
        self._drafts: weakref.WeakValueDictionary[str, Draft] = weakref.WeakValueDictionary()
        self._heads: weakref.WeakValueDictionary[tuple[int, ...], TrimmedHead] = weakref.WeakValueDictionary()
        self._spare: list[PreTrainedModel] = []  # copies that nobody drafts with
        self._lock = threading.Lock()
        ends = (draft.get_input_embeddings(), draft.get_output_embeddings())
        self._shared_with_target = {id(p) for end in ends if end is not None for p in end.parameters()}

    @torch.inference_mode(False)
    @torch.no_grad()
    def prepare(self, loaded: LoadedRelease) -> Drafts:
        """Return the drafts of a release; those that are in use already, by another one, are shared with it.

        Raises:
            ReleaseError: an unknown name, a wrong shape, a value that is not finite, tokens that do not exist.
        """
        with self._lock:
            own = {domain: self._draft(deltas) for domain, deltas in loaded.own.items()}
            vocabulary = loaded.release.vocabulary
            trimmed = None if vocabulary is None else self._trimmed(vocabulary)
            return Drafts(loaded.release, self._draft(loaded.deltas), own, trimmed)

    def _draft(self, deltas: Deltas) -> Draft:
        if not deltas:
            return self._untouched
        values = {name: self._merged(name, deltas[name]) for name in sorted(deltas)}
        name = _digest(values)
        draft = self._drafts.get(name)
        if draft is None:
            model = self._copy(values)
            draft = self._drafts[name] = Draft(model, name)
            weakref.finalize(draft, self._spare.append, model).atexit = False
        return draft

    def _copy(self, values: Mapping[str, Tensor]) -> PreTrainedModel:
        """The base with some values in the place of its own."""
        model = (
            self._spare.pop() if self._spare else copy.deepcopy(self.base, {id(p): p for p in self.base.parameters()})
        )
        parameters = dict(model.named_parameters())
        for name, base in self._parameters.items():
            if parameters[name] is not base:
                parameters[name].copy_(values.get(name, base))
            elif name in values:
                place, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(place), leaf, nn.Parameter(values[name], requires_grad=False))
        return model

    def _merged(self, name: str, delta: Tensor) -> Tensor:
        base = self._parameters.get(name)
        if base is None or base.shape != delta.shape:
            found = "no such parameter" if base is None else f"{tuple(base.shape)} is there, {tuple(delta.shape)} came"
            raise ReleaseError(f"The update of {name} does not fit the draft ({found}). Train against this draft.")
        if id(base) in self._shared_with_target:
            raise ReleaseError(
                f"The update of {name} would change embeddings or head, which a draft may share with its target. Train "
                "an adapter of the layers only."
            )
        value = base.float() + delta.to(base.device).float()
        if not bool(torch.isfinite(value).all()):
            raise ReleaseError(f"The update of {name} is not finite. The release is damaged; publish another.")
        return value.to(base.dtype)

    def _trimmed(self, vocabulary: tuple[int, ...]) -> TrimmedHead:
        trimmed = self._heads.get(vocabulary)
        if trimmed is None:
            trimmed = self._heads[vocabulary] = self._trim(vocabulary)
        return trimmed

    def _trim(self, vocabulary: tuple[int, ...]) -> TrimmedHead:
        head = self.base.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ReleaseError("This draft's head is no linear layer; its vocabulary cannot be trimmed.")
        token_ids = torch.tensor(sorted(set(vocabulary)), dtype=torch.long, device=head.weight.device)
        if not len(token_ids) or int(token_ids[0]) < 0 or int(token_ids[-1]) >= head.out_features:
            raise ReleaseError(f"A trimmed vocabulary names tokens in [0, {head.out_features}); publish another.")
        trimmed = copy.copy(head)
        trimmed._parameters = dict(head._parameters, weight=nn.Parameter(head.weight[token_ids], requires_grad=False))
        if head.bias is not None:
            trimmed._parameters["bias"] = nn.Parameter(head.bias[token_ids], requires_grad=False)
        trimmed.out_features = len(token_ids)
        return TrimmedHead(trimmed, token_ids)


@torch.no_grad()
def merge_into(draft: PreTrainedModel, loaded: LoadedRelease) -> None:
    """Give a draft the weights of a release's shared adapter for good, for decoders that know of no release.

    Raises:
        ReleaseError: as ``DraftWeights.prepare``; the draft is then unchanged.
    """
    merged = dict(DraftWeights(draft).prepare(loaded).shared.model.named_parameters())
    for name, parameter in draft.named_parameters():
        parameter.copy_(merged[name])


def _digest(values: Mapping[str, Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for name, value in values.items():
        digest.update(name.encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
