"""The relaxed rules in plain loops, as slow and as plain as can be; the tensor functions are compared with them."""

import math
from collections import Counter

Probs = list[float]


def overlap(chain: list[int], target: list[int], size: int) -> float:
    """Of one chain, without padding."""
    if not chain:
        return 1.0
    size = min(size, len(chain))

    def grams(tokens: list[int]) -> Counter[tuple[int, ...]]:
        return Counter(tuple(tokens[i : i + size]) for i in range(len(chain) - size + 1))

    ours, theirs = grams(chain), grams(target)
    return sum(min(count, theirs[gram]) for gram, count in ours.items()) / ours.total()


def kl(first: Probs, second: Probs) -> float:
    total = 0.0
    for p, q in zip(first, second, strict=True):
        if p > 0:
            total += math.inf if q == 0 else p * math.log(p / q)
    return total


def similarity(target: Probs, draft: Probs, measure: str) -> float:
    pairs = list(zip(target, draft, strict=True))
    if measure == "kl":
        return math.exp(-kl(target, draft))
    if measure == "reverse_kl":
        return math.exp(-kl(draft, target))
    if measure == "js":
        middle = [(p + q) / 2 for p, q in pairs]
        return 1 - (kl(target, middle) + kl(draft, middle)) / 2 / math.log(2)
    if measure == "tv":
        return 1 - sum(abs(p - q) for p, q in pairs) / 2
    dot = sum(p * q for p, q in pairs)
    return dot / math.sqrt(sum(p * p for p in target)) / math.sqrt(sum(q * q for q in draft))


def typical(target: Probs, token: int, epsilon: float, delta: float) -> bool:
    entropy = -sum(p * math.log(p) for p in target if p > 0)
    return target[token] > min(epsilon, delta * math.exp(-entropy))


def topk(target: Probs, token: int, top_k: int, delta: float) -> bool:
    rank = sum(p > target[token] for p in target)
    return rank < top_k and target[token] >= max(target) - delta
