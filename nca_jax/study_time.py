"""How long what is left of a study will take: from what its finished runs took, and what is said of the others."""

from collections.abc import Hashable, Mapping
from statistics import fmean


def remaining(
    points: Mapping[str, tuple[Hashable, float | None]], took: Mapping[str, float | None]
) -> tuple[float, int] | None:
    """Seconds that the runs which are not finished will take, and of how many of them that is measured: a run takes as
    long as the same with other seeds has; else as long as assumed, times what finished runs took over what was assumed
    of them; else, where nothing is assumed, as long as the others on average.

    Args:
      points: name of a run -> what it is but for its seed, and its assumed seconds or None.
      took: name of a finished run -> its seconds, or None where they are not known.

    Returns:
      None: nothing is known of one of them.
    """
    known = {name: seconds for name, seconds in took.items() if seconds is not None}
    of_point: dict[Hashable, list[float]] = {}
    for name, seconds in known.items():
        of_point.setdefault(points[name][0], []).append(seconds)
    compared = [(seconds, points[name][1]) for name, seconds in known.items() if points[name][1]]
    speed = sum(s for s, _ in compared) / sum(a for _, a in compared) if compared else 1.0
    total, measured = 0.0, 0
    for point, assumed in (points[name] for name in points if name not in took):
        if point in of_point:
            total, measured = total + fmean(of_point[point]), measured + 1
        elif assumed is not None:
            total += assumed * speed
        elif known:
            total += fmean(known.values())
        else:
            return None
    return total, measured


def remaining_words(found: tuple[float, int] | None, runs: int, finished: int) -> str:
    """ "12 of 117 runs are finished; the others take about 6 h 40 min (30 of 105 by their other seeds)"."""
    said = f"{finished} of {runs} runs are finished"
    left = runs - finished
    if not left:
        return said
    if found is None:
        return f"{said}; how long the others take is known when the first is"
    seconds, measured = found
    return f"{said}; the others take about {as_time(seconds)} ({measured} of {left} by their other seeds)"


def as_time(seconds: float) -> str:
    """ "6 h 40 min", "5 min", "40 s"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
