"""A ragged static KV cache: every row has its own length, nothing is reallocated or concatenated in the loop.

Live rows are always rows 0 … n-1, so that what attention reads is a view.  Tokens rejected by verification stay in
memory and are overwritten: a query at position p is shown key positions <= p of its own row, no others.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from adaptive_spec.errors import ModelError
from adaptive_spec.verification.transfer import on_device

_LEAST_WINDOW = 128
_MOST_SHAPES = 64
_CHECKED_TOKENS = 4
_LOGITS_AGREE = 0.02  # of the largest logit; low precision differs by less, another formula by more


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
        window, longest, place = self.owner.window, self.owner.longest, self.owner.place
        if place is not None:
            self.keys[window, :, place] = key_states
            self.values[window, :, place] = value_states
        else:
            rows, positions = self.owner.rows, self.owner.positions
            self.keys[rows[:, None], :, positions] = key_states.transpose(1, 2)
            self.values[rows[:, None], :, positions] = value_states.transpose(1, 2)
        return self.keys[window, :, :longest], self.values[window, :, :longest]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.longest, 0

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_max_length(self) -> int:
        return self.owner.capacity


class RaggedCache(Cache):
    """Storage for ``slots`` rows of ``capacity`` tokens, and the forward pass that uses it.

    Args:
        widest: tokens that one forward may bring at most.
        static: give forwards few different shapes, so that each can be compiled or captured once: all slots take part
            (those not asked for write behind the capacity, where nobody reads), and the number of keys that attention
            reads is a power of two.
        compile_mode: how torch.compile is to compile the forward; None: not at all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        capacity: int,
        widest: int,
        *,
        static: bool = False,
        compile_mode: str | None = None,
    ) -> None:
        config = model.config.get_text_config()
        _check_attention(config, capacity)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (slots, heads, capacity + widest, head_dim)
        self.model = model
        self.slots = slots
        self.capacity = capacity
        self.widest = widest
        self.static = static
        self.longest = 0
        self.rows = torch.zeros(0, dtype=torch.long)
        self.positions = torch.zeros(0, 0, dtype=torch.long)
        self.window: slice | Tensor = slice(0, 0)
        self.place: slice | None = None  # of all rows alike: written as a block
        like = {"dtype": model.dtype, "device": model.device}
        super().__init__(
            layers=[
                _RaggedLayer(self, torch.zeros(shape, **like), torch.zeros(shape, **like))
                for _ in range(config.num_hidden_layers)
            ]
        )
        self._hidden = self._run
        self._check_logits()
        if compile_mode:
            self._hidden = _compiled(self._run, compile_mode)

    def forward(
        self,
        rows: list[int],
        ids: Tensor,
        starts: list[int],
        *,
        last: list[int] | None = None,
        model: PreTrainedModel | None = None,
        head: nn.Module | None = None,
    ) -> Tensor:
        """Run the model over new tokens of some rows.  What the host decides comes as lists: nothing is read back.

        Args:
            rows: which rows, ascending.
            ids: [rows, tokens], padded on the right.
            starts: the position of each row's first new token.
            last: index of the one token of each row whose logits are wanted; None: all.
            model, head: stand in for the cache's own model and its head; same layers, other weights.

        Returns:
            Logits [rows, tokens, vocab], or [rows, vocab] with ``last``.
        """
        model = model or self.model
        hidden = self._advance(rows, ids, starts, model)
        if last is not None:
            hidden = hidden[on_device(list(range(len(rows))), ids.device), on_device(last, ids.device)]
        return (head or model.lm_head)(hidden)

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Refuse a model whose forward does more than its layers, its head and plain attention, or less."""
        ids = torch.arange(1, _CHECKED_TOKENS + 1, device=self.model.device)[None]
        alone = self.model(input_ids=ids, use_cache=False).logits.float()
        try:
            here = self.forward([0], ids, [0]).float()
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            raise ModelError(
                f"{type(self.model).__name__} does not decode here ({error}). Choose a decoder-only model with full "
                "attention, such as Llama, Qwen, Mistral or SmolLM."
            ) from error
        if not torch.allclose(here, alone, rtol=0, atol=_LOGITS_AGREE * float(alone.abs().max())):
            raise ModelError(
                f"{type(self.model).__name__} gives other logits here than by itself: it does more than attention and "
                "a head (scaled or capped logits, for instance). Choose a model of another family."
            )

    def _advance(
        self, rows: list[int], ids: Tensor, starts: list[int], model: PreTrainedModel, alone: bool = False
    ) -> Tensor:
        """Hidden states [rows, tokens, hidden].  alone: also where shapes are static, no other slots take part."""
        device, width = ids.device, ids.shape[1]
        self.longest = max(starts) + width
        if not self.static:
            self._place(rows, starts, width, device)
            # The beginning of one row is plainly causal, and its single next token sees all there is; without a mask
            # attention leaves out what it cannot see.
            visible = None if starts == [0] or (len(rows) == 1 and width == 1) else self._visible()
            return self._hidden(model.model, ids, self.positions, visible)
        self.longest = min(max(_LEAST_WINDOW, 1 << (self.longest - 1).bit_length()), self.capacity + width)
        if alone:
            self._place(rows, starts, width, device)
            self.window = self.rows  # a tensor: which row it is must not become part of a compiled shape
            return self._hidden(model.model, ids, self.positions, self._visible())
        asked, given = on_device(rows, device), dict(zip(rows, starts, strict=True))
        everyone = list(range(self.slots))
        self._place(everyone, [given.get(row, self.capacity) for row in everyone], width, device)
        ids = torch.zeros(self.slots, width, dtype=ids.dtype, device=device).index_copy(0, asked, ids)
        return self._hidden(model.model, ids, self.positions, self._visible())[asked]

    def _place(self, rows: list[int], starts: list[int], width: int, device: torch.device) -> None:
        """Say where the next tokens go and what attention reads."""
        self.rows = on_device(rows, device)
        self.positions = on_device(starts, device)[:, None] + torch.arange(width, device=device)
        contiguous = rows[-1] - rows[0] == len(rows) - 1
        self.window = slice(rows[0], rows[-1] + 1) if contiguous else self.rows
        alike = contiguous and not self.static and len(set(starts)) == 1
        self.place = slice(starts[0], starts[0] + width) if alike else None

    def _visible(self) -> Tensor:
        return torch.arange(self.longest, device=self.positions.device) <= self.positions[:, None, :, None]

    def _run(self, body: nn.Module, ids: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        return body(
            input_ids=ids, attention_mask=visible, position_ids=positions, cache=self, use_cache=True
        ).last_hidden_state

    def prefill(
        self,
        row: int,
        tokens: list[int],
        start: int,
        stop: int,
        chunk: int,
        *,
        model: PreTrainedModel | None = None,
        wants_logits: bool = False,
    ) -> Tensor | None:
        """Bring tokens[start:stop] of a row into the cache, at most ``chunk`` at a time.

        Returns the logits of the last one, [1, vocab], if wanted.
        """
        model = model or self.model
        hidden = None
        for begin in range(start, stop, chunk):
            part = tokens[begin : min(begin + chunk, stop)]
            padding = [0] * (self.widest - len(part)) if self.static else []
            ids = on_device([part + padding], self.model.device)
            hidden = self._advance([row], ids, [begin], model, alone=True)[:, len(part) - 1]
        return model.lm_head(hidden) if wants_logits and hidden is not None else None

    def copy(self, row: int, start: int, stop: int) -> Tensor:
        """The keys and values of some positions of a row: [layers, 2, heads, positions, head_dim]."""
        return torch.stack([torch.stack([pair[row, :, start:stop] for pair in stores]) for stores in self._stores()])

    def write(self, row: int, start: int, block: Tensor) -> None:
        """Put a copy back, at any row; its positions are part of it and must be the same."""
        for stores, kept in zip(self._stores(), block, strict=True):
            for store, values in zip(stores, kept, strict=True):
                store[row, :, start : start + values.shape[1]] = values

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another."""
        for stores in self._stores():
            for store in stores:
                store[destination, :, :length] = store[source, :, :length]

    def _stores(self) -> Iterator[tuple[Tensor, Tensor]]:
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None
            yield layer.keys, layer.values


def _check_attention(config: Any, capacity: int) -> None:
    """Sliding windows are full attention while nothing is longer than the window; anything else is refused."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(
            f"The model has layers of kind {sorted(unknown)}; only attention is decoded. Choose a model without "
            "recurrent or convolutional layers."
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not getattr(config, "layer_types", None)
    if slides and window and capacity > window:
        raise ModelError(
            f"The model attends to the last {window} tokens only, and contexts here may reach {capacity}. "
            f"Lower decoder.max_context_tokens to {max(1, window - (capacity - window))} or less."
        )


def _compiled(function: Any, mode: str) -> Any:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_SHAPES)
    return torch.compile(function, mode=mode, dynamic=False)
