"""The drafts of a release: base weights plus deltas, in place, and a head of the tokens that traffic uses.

Always merged from a pristine copy into the live tensors in place: nothing drifts over many swaps, and whatever holds
on to the tensors (a captured graph) stays valid.

A release has one shared adapter, and domains may have adapters of their own.  Each adapter is a model with its updates
merged; they share every tensor that no adapter changes, so another adapter costs the memory of the tensors it changes.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adaptive_spec.errors import ReleaseError

Deltas = Mapping[str, Tensor]  # parameter name -> dense low-rank update, of the parameter's shape


@dataclass(slots=True)
class TrimmedHead:
    """The rows of the head that belong to some tokens.

    Lossless: tokens without a row have draft probability 0, and rejection sampling holds for any draft distribution.
    """

    head: nn.Linear
    token_ids: Tensor  # [tokens], ascending


class DraftWeights:
    """The live drafts.  ``shared`` is the model that was given; ``own`` holds a model per domain with an adapter."""

    def __init__(self, draft: PreTrainedModel) -> None:
        self.shared = draft
        self.own: dict[str, PreTrainedModel] = {}
        self.trimmed: TrimmedHead | None = None
        self._parameters = dict(draft.named_parameters())
        self._pristine: dict[str, Tensor] = {}
        ends = (draft.get_input_embeddings(), draft.get_output_embeddings())
        self._shared_with_target = {id(p) for end in ends if end is not None for p in end.parameters()}

    def of(self, domain: str) -> PreTrainedModel:
        """The draft that serves a domain."""
        return self.own.get(domain, self.shared)

    @property
    def head(self) -> nn.Module | None:
        """What stands in for the draft's head: the rows of the trimmed vocabulary."""
        return None if self.trimmed is None else self.trimmed.head

    @torch.no_grad()
    def merge(
        self, deltas: Deltas, own: Mapping[str, Deltas] | None = None, vocabulary: Sequence[int] | None = None
    ) -> None:
        """Make the live weights base + deltas.  Parameters not named go back to the base.

        Args:
            deltas: of the shared adapter.
            own: of the domains' own adapters, by domain; each stands for itself, not on top of the shared one.
            vocabulary: the only tokens that drafts may propose; None: all.

        Raises:
            ReleaseError: an unknown name, a wrong shape or a non-finite value; the live weights are then unchanged.
        """
        merged = {name: self._merged(name, delta) for name, delta in deltas.items()}
        merged_own = {
            domain: {name: self._merged(name, delta) for name, delta in changed.items()}
            for domain, changed in (own or {}).items()
        }
        trimmed = None if vocabulary is None else self._trim(vocabulary)
        changed = {name for values in (merged, *merged_own.values()) for name in values}
        for name in changed - self._pristine.keys():
            self._pristine[name] = self._parameters[name].detach().clone()
        models = {domain: self._model(domain, values) for domain, values in merged_own.items()}
        for name, pristine in self._pristine.items():
            self._parameters[name].copy_(merged.get(name, pristine))
        self.own, self.trimmed = models, trimmed

    def _model(self, domain: str, values: Mapping[str, Tensor]) -> PreTrainedModel:
        """A model of its own tensors where any release has changed the base, of shared ones elsewhere."""
        shared = {id(p): p for name, p in self._parameters.items() if name not in self._pristine}
        model = self.own.get(domain)
        if model is None or any(dict(model.named_parameters())[n] is self._parameters[n] for n in self._pristine):
            model = copy.deepcopy(self.shared, shared)
        parameters = dict(model.named_parameters())
        for name, pristine in self._pristine.items():
            parameters[name].copy_(values.get(name, pristine))
        return model

    def _merged(self, name: str, delta: Tensor) -> Tensor:
        live = self._parameters.get(name)
        if live is None or live.shape != delta.shape:
            found = "no such parameter" if live is None else f"{tuple(live.shape)} is live, {tuple(delta.shape)} came"
            raise ReleaseError(f"The update of {name} does not fit the draft ({found}). Train against this draft.")
        if id(live) in self._shared_with_target:
            raise ReleaseError(
                f"The update of {name} would change embeddings or head, which a draft may share with its target. Train "
                "an adapter of the layers only."
            )
        value = self._pristine.get(name, live.detach()).float() + delta.to(live.device).float()
        if not bool(torch.isfinite(value).all()):
            raise ReleaseError(f"The update of {name} is not finite. The release is damaged; publish another.")
        return value.to(live.dtype)

    def _trim(self, vocabulary: Sequence[int]) -> TrimmedHead:
        head = self.shared.get_output_embeddings()
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
