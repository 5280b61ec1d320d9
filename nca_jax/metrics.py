"""What a paired evaluation says. Pure functions of lists of booleans and lengths; no arrays, no model."""

from collections.abc import Sequence


def accuracy(correct: Sequence[bool]) -> float:
    """Share of right answers over all items given."""
    return sum(correct) / len(correct)


def paired_metrics(
    without: Sequence[bool], with_context: Sequence[bool], without_length: Sequence[int], with_length: Sequence[int]
) -> dict[str, float]:
    """Metrics of the same items answered without and with the context.

    Args:
      without, with_context: whether each item was answered right; same order.
      without_length, with_length: tokens of each response.

    Returns:
      "no_context", "with_context": accuracies. "both": share right in both views. "harm": P(wrong with the context |
      right without it), 0 where nothing is right without it; "harmed" of "right_without" items are its numerator and
      denominator. "help": P(right with | wrong without). "length_change": mean length with the context over mean
      length without it, minus 1.
    """
    if not len(without) == len(with_context) == len(without_length) == len(with_length) > 0:
        raise ValueError("paired metrics need the same, non-zero number of items in both views")
    pairs = list(zip(without, with_context, strict=True))
    right_without = sum(x for x, _ in pairs)
    harmed = sum(x and not c for x, c in pairs)
    helped = sum(c and not x for x, c in pairs)
    wrong_without = len(pairs) - right_without
    return {
        "no_context": accuracy(without),
        "with_context": accuracy(with_context),
        "both": sum(x and c for x, c in pairs) / len(pairs),
        "harm": harmed / right_without if right_without else 0.0,
        "help": helped / wrong_without if wrong_without else 0.0,
        "harmed": harmed,
        "right_without": right_without,
        "length_change": sum(with_length) / sum(without_length) - 1.0 if sum(without_length) else 0.0,
    }
