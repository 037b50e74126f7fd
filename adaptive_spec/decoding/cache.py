"""A ragged static KV cache: every row has its own length, nothing is reallocated or concatenated in the loop.

Live rows are always rows 0 … n-1, so that what attention reads is a view.  Tokens rejected by verification stay in
memory and are overwritten: a query at position p is shown key positions <= p of its own row, no others.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from adaptive_spec.errors import ModelError

_FEW_ROWS = 128


class _RaggedLayer(CacheLayerMixin):
    is_compileable = False

    def __init__(self, owner: "RaggedCache", keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.owner = owner
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [rows, heads, tokens, head_dim] at the owner's positions; return all that may be read."""
        assert self.keys is not None and self.values is not None
        rows, positions = self.owner.rows, self.owner.positions
        self.keys[rows[:, None], :, positions] = key_states.transpose(1, 2)
        self.values[rows[:, None], :, positions] = value_states.transpose(1, 2)
        window, longest = self.owner.window, self.owner.longest
        return self.keys[window, :, :longest], self.values[window, :, :longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.longest, 0

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_max_length(self) -> int:
        return self.owner.capacity


class RaggedCache(Cache):
    """Storage for ``slots`` rows of ``capacity`` tokens, and the forward pass that uses it."""

    def __init__(self, model: PreTrainedModel, slots: int, capacity: int) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ModelError(
                f"The model has layers of kind {sorted(kinds - {'full_attention'})}; only full attention is decoded. "
                "Choose a model without sliding-window or recurrent layers."
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (slots, heads, capacity, head_dim)
        self.model = model
        self.capacity = capacity
        self.longest = 0
        self.rows = torch.zeros(0, dtype=torch.long)
        self.positions = torch.zeros(0, 0, dtype=torch.long)
        self.window: slice | Tensor = slice(0, 0)
        like = {"dtype": model.dtype, "device": model.device}
        super().__init__(
            layers=[
                _RaggedLayer(self, torch.zeros(shape, **like), torch.zeros(shape, **like))
                for _ in range(config.num_hidden_layers)
            ]
        )

    def forward(self, rows: list[int], ids: Tensor, starts: Tensor, *, last: Tensor | None = None) -> Tensor:
        """Run the model over new tokens of some rows.

        Args:
            rows: which rows, ascending.
            ids: [rows, tokens], padded on the right.
            starts: [rows], the position of each row's first new token.
            last: [rows], index of the one token whose logits are wanted; None: all.

        Returns:
            Logits [rows, tokens, vocab], or [rows, vocab] with ``last``.
        """
        device = ids.device
        self.rows = torch.tensor(rows, device=device)
        self.positions = starts[:, None] + torch.arange(ids.shape[1], device=device)
        self.longest = int(self.positions.max()) + 1
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        self.window = slice(rows[0], rows[0] + len(rows)) if contiguous else self.rows
        visible = torch.arange(self.longest, device=device) <= self.positions[:, None, :, None]
        hidden = self.model.model(
            input_ids=ids, attention_mask=visible, position_ids=self.positions, cache=self, use_cache=True
        ).last_hidden_state
        if last is not None:
            hidden = hidden[torch.arange(len(rows), device=device), last]
        return _head_logits(self.model.lm_head, hidden)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another."""
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                assert store is not None
                store[destination, :, :length] = store[source, :, :length]


def _head_logits(head: nn.Module, hidden: Tensor) -> Tensor:
    """Apply the head.  [..., hidden] -> [..., vocab]

    On a CPU the product of a few rows with a wide head is up to three times faster with its sides exchanged.
    """
    rows = hidden.flatten(0, -2)
    few = 1 < len(rows) <= _FEW_ROWS and hidden.device.type == "cpu" and hidden.dtype == torch.float32
    if few and isinstance(head, nn.Linear) and head.bias is None:
        return (head.weight @ rows.T).T.contiguous().view(*hidden.shape[:-1], -1)
    logits: Tensor = head(hidden)
    return logits
