"""The draft with a release on top: base weights plus deltas, in place.

Always merged from a pristine copy into the live tensors in place: nothing drifts over many swaps, and whatever holds
on to the tensors (a captured graph) stays valid.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.errors import ReleaseError


class DraftWeights:
    """The live draft's weights and the pristine values of those that releases have changed."""

    def __init__(self, draft: PreTrainedModel) -> None:
        self._parameters = dict(draft.named_parameters())
        self._pristine: dict[str, Tensor] = {}

    @torch.no_grad()
    def merge(self, deltas: Mapping[str, Tensor]) -> None:
        """Make the live weights base + deltas.  Parameters not named go back to the base.

        Raises:
            ReleaseError: an unknown name, a wrong shape or a non-finite value; the live weights are then unchanged.
        """
        merged = {name: self._merged(name, delta) for name, delta in deltas.items()}
        for name in self._pristine.keys() - merged.keys():
            self._parameters[name].copy_(self._pristine[name])
        for name, value in merged.items():
            if name not in self._pristine:
                self._pristine[name] = self._parameters[name].detach().clone()
            self._parameters[name].copy_(value)

    def _merged(self, name: str, delta: Tensor) -> Tensor:
        live = self._parameters.get(name)
        if live is None or live.shape != delta.shape:
            found = "no such parameter" if live is None else f"{tuple(live.shape)} is live, {tuple(delta.shape)} came"
            raise ReleaseError(f"The update of {name} does not fit the draft ({found}). Train against this draft.")
        value = self._pristine.get(name, live.detach()).float() + delta.to(live.device).float()
        if not bool(torch.isfinite(value).all()):
            raise ReleaseError(f"The update of {name} is not finite. The release is damaged; publish another.")
        return value.to(live.dtype)
