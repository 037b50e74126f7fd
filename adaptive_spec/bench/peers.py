"""Other people's decoders on the same pair: transformers' three ways, and flashspec where it is installed.

They run on a pair of their own, so that nothing our decoder does to its modules helps or hinders them.
"""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adaptive_spec.bench.sides import PEERS, REFERENCE, DecodePhase, Runner, Task, Turn
from adaptive_spec.models.loading import ModelPair

_LOOKUP_TOKENS = 3  # as in transformers' own guide


def peer_runners(pair: ModelPair, names: Sequence[str]) -> dict[str, Runner]:
    """Return the runners of those peers that are named."""
    extras: dict[str, dict[str, Any]] = {
        REFERENCE: {},
        "transformers assisted": {"assistant_model": pair.draft},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
    }
    target, draft = ForwardClock(pair.target), ForwardClock(pair.draft)
    return {
        name: TransformersRunner(pair, extras[name], target, draft)
        if name in extras
        else FlashSpecRunner(pair, target, draft)
        for name in PEERS
        if name in names
    }


class ForwardClock:
    """When a model's forwards ended and how long each took."""

    def __init__(self, model: nn.Module) -> None:
        self._began = 0.0
        self._forwards: list[tuple[float, float]] = []
        self._hooks = (model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end))

    def forget(self) -> None:
        """Begin a new turn."""
        self._forwards.clear()

    def seconds_after(self, moment: float) -> float:
        """Seconds in forwards that ended after a moment."""
        return sum(seconds for ended, seconds in self._forwards if ended > moment)

    def close(self) -> None:
        """Leave the model alone."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        now = time.perf_counter()
        self._forwards.append((now, now - self._began))


class _Peer:
    """What the peers share: their models' clocks."""

    def __init__(self, pair: ModelPair, target: ForwardClock, draft: ForwardClock) -> None:
        self._pair = pair
        self._target_clock = target
        self._draft_clock = draft

    def close(self) -> None:
        """Take the clocks off the models."""
        self._target_clock.close()
        self._draft_clock.close()

    def _forget(self) -> None:
        self._target_clock.forget()
        self._draft_clock.forget()

    def _decode_phase(self, num_tokens: int, first: float, ended: float) -> DecodePhase:
        # A forward on another device returns before it is done, so there its seconds mean nothing.
        on_cpu = self._pair.device.type == "cpu"
        return DecodePhase(
            num_tokens,
            ended - first,
            self._draft_clock.seconds_after(first) if on_cpu else None,
            self._target_clock.seconds_after(first) if on_cpu else None,
        )


class TransformersRunner(_Peer):
    """``generate`` of transformers: greedy, its own cache, its defaults; several prompts padded on the left."""

    def __init__(self, pair: ModelPair, extra: dict[str, Any], target: ForwardClock, draft: ForwardClock) -> None:
        super().__init__(pair, target, draft)
        self._extra = extra
        self._models = (pair.target, pair.draft)
        self._ends = tuple(model.generation_config.eos_token_id for model in self._models)
        self._padding = pair.eos_token_ids[0] if pair.eos_token_ids else 0

    def refusal(self, task: Task) -> str | None:
        """Assisted generation and prompt lookup take one prompt at a time."""
        return "transformers speculates at batch 1 only" if self._extra and len(task.prompts) > 1 else None

    def run(self, task: Task) -> Turn:
        """Call ``generate`` once."""
        self._set_ends(None if task.ignore_eos else self._ends)
        width = max(map(len, task.prompts))
        rows = [[self._padding] * (width - len(ids)) + list(ids) for ids in task.prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in task.prompts]
        heard = _Streamer()
        self._forget()
        began = time.perf_counter()
        output = self._pair.target.generate(
            torch.tensor(rows, device=self._pair.device),
            attention_mask=torch.tensor(mask, device=self._pair.device),
            max_new_tokens=task.max_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=self._padding,
            streamer=heard,
            **self._extra,
        )
        answers: list[list[int]] = output[:, width:].tolist()
        ended = time.perf_counter()
        ends = frozenset[int]() if task.ignore_eos else frozenset(self._pair.eos_token_ids)
        tokens = [until_end(answer, ends) for answer in answers]
        first, num_first = heard.moments[0]
        num_tokens = sum(map(len, tokens))
        num_steps = len(heard.moments) if self._extra else num_tokens
        decode = self._decode_phase(num_tokens - num_first, first, ended)
        return Turn(tokens, ended - began, first - began, num_steps, decode)

    def close(self) -> None:
        """Leave the models as they came."""
        super().close()
        self._set_ends(self._ends)

    def _set_ends(self, ends: Sequence[Any] | None) -> None:
        for place, model in enumerate(self._models):
            model.generation_config.eos_token_id = ends[place] if ends else None


class FlashSpecRunner(_Peer):
    """The package flashspec with its defaults: prompt lookup where it matches, else the draft model."""

    def __init__(self, pair: ModelPair, target: ForwardClock, draft: ForwardClock) -> None:
        super().__init__(pair, target, draft)
        self._engine: Any = None
        try:
            from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
            from flashspec.engine import HuggingFaceDrafter, TargetModel
        except ImportError:
            return
        dtype = pair.target.dtype
        self._engine = SpeculativeEngine(
            FlashSpecConfig(
                device=str(pair.device),
                dtype=str(dtype).removeprefix("torch."),
                sampling=SamplingConfig(temperature=0.0),
            ),
            [HuggingFaceDrafter("draft", pair.device, dtype, model=pair.draft)],
            TargetModel("target", pair.device, dtype, model=pair.target),
        )

    def refusal(self, task: Task) -> str | None:
        """Not installed, or a batch that it has no fast path for."""
        if self._engine is None:
            return "flashspec is not installed: pip install 'adaptive-spec[bench]'"
        return "flashspec's own path is for batch 1" if len(task.prompts) > 1 else None

    def run(self, task: Task) -> Turn:
        """Call its ``generate`` once."""
        prompt = torch.tensor(task.prompts, device=self._pair.device)
        ends = () if task.ignore_eos else self._pair.eos_token_ids
        self._forget()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it passes caches by their former name
            began = time.perf_counter()
            result = self._engine.generate(prompt, max_new_tokens=task.max_tokens, eos_token_ids=ends)
            ended = time.perf_counter()
        answer: list[int] = result.output_ids[0, : result.n_tokens_generated].tolist()
        steps = result.arm_steps
        first = began + steps[0].seconds  # which hold the prefill
        decode = self._decode_phase(len(answer) - steps[0].emitted, first, ended)
        return Turn([answer], ended - began, first - began, len(steps), decode)


class _Streamer:
    """When ``generate`` handed how many tokens over; the prompt, which it hands over first, is not counted."""

    def __init__(self) -> None:
        self.moments: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, tokens: Tensor) -> None:
        if self._prompt_seen:
            self.moments.append((time.perf_counter(), tokens.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""


def until_end(answer: list[int], ends: frozenset[int]) -> list[int]:
    """The answer up to its end token, the padding after it cut off."""
    stop = next((place for place, token in enumerate(answer) if token in ends), len(answer) - 1)
    return answer[: stop + 1]
