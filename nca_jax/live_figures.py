"""The report's figures of a run that is still going on, for TensorBoard and the like."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nca_jax.figures import RunData, all_figures
from nca_jax.items import evaluation_path, evaluation_steps, read_items


class LiveFigures:
    """Draws all that there is after each evaluation; what earlier ones say is computed once.

    Args:
      workdir: of the run.
      method: as `settings.method_name`.
      until: the step the run continues from; evaluations of later ones are done again.
    """

    def __init__(self, workdir: epath.Path, method: str, until: int):
        self._workdir = workdir
        known = {
            step: read_items(evaluation_path(workdir, step)) for step in evaluation_steps(workdir) if step <= until
        }
        self._run = RunData(str(workdir), method, method, method, [], known, {})

    def after_evaluation(self, step: int, records: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Name -> picture [height, width, RGBA], uint8.

        Args:
          step: whose item lines are written.
          records: of metrics.jsonl.
        """
        self._run.evaluations[step] = read_items(evaluation_path(self._workdir, step))
        self._run.steps = [record for record in records if "loss" in record]
        return {f"figures/{named.name}": _pixels(named.figure) for named in all_figures([self._run])}


def _pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
