"""How training has moved the weights: where the updates are large, and the angles between those of several runs.

Nothing is computed with a model: weights are read from the checkpoints side by side, at most one weight of each at a
time. Squares and dot products are summed in float64 on the host, since an update is a small difference of large sums,
and reading takes longer than that.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tqdm import tqdm

from nca_jax.analysis.common import ALL, MODULES, Checkpoint, Finding, Group, in_words, sums_by_group, with_gaps
from nca_jax.files import absolute
from nca_jax.models.decoder import parameter_count, weight_table
from nca_jax.models.layers import is_stacked, piece_names
from nca_jax.models.orbax_params import ORBAX_PARAMS, check_pieces
from nca_jax.plotting import legend, new_figure, series, title
from nca_jax.stored_model import StoredModel

TITLE = "Updates of the weights"

_BLOCK = 2**20  # numbers that are in float64 at one time, of each model

Reader = Callable[[str, int | None], Any]


def readers(models: Sequence[StoredModel]) -> tuple[list[Reader], bool]:
    """A function from (name, layer) to an array for each model, and whether all are to be asked layer by layer.

    They are asked together, in one order. If some models are stored by layer and others by weight, the former are read
    out of their order, which takes a request more for each array and no more memory.

    Raises:
      UserError: as `StoredModel.reader`.
    """
    found = [model.reader() for model in models]
    by_layer = all(of_layers for _, of_layers in found)
    return [
        _in_any_order(model) if of_layers and not by_layer else reader
        for model, (reader, of_layers) in zip(models, found, strict=True)
    ], by_layer


def _in_any_order(model: StoredModel) -> Reader:
    """Single arrays of an imported model."""
    directory = absolute(epath.Path(model.directory) / ORBAX_PARAMS)
    check_pieces(directory, model.arch)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())

    def read(name: str, layer: int | None) -> np.ndarray:
        keys = [name] if layer is None else ["layers", str(layer), name]
        item: Any = 0
        how: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for key in reversed(keys):
            item, how = {key: item}, {key: how}
        arguments = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
        found = checkpointer.restore(directory, args=arguments)
        for key in keys:
            found = found[key]
        return found

    return read


def measure(base: StoredModel, checkpoints: Sequence[Checkpoint]) -> dict[str, np.ndarray]:
    """Dot products of the base's weights and the updates of all checkpoints with each other.

    Returns:
      weight name -> float64 [L, n + 1, n + 1], or [n + 1, n + 1] outside the layers: 0 is the base itself, k the
      update W_k - W_0 of the k-th of n checkpoints.
    """
    arch, n = base.arch, len(checkpoints)
    ask, by_layer = readers([base, *(checkpoint.model for checkpoint in checkpoints)])
    found = {
        name: np.zeros((arch.num_layers, n + 1, n + 1) if is_stacked(spec) else (n + 1, n + 1))
        for name, spec in weight_table(arch).items()
    }
    with tqdm(total=parameter_count(arch), desc="updates", unit="weight", unit_scale=True, disable=None) as progress:
        for name, layer in piece_names(arch, by_layer):
            total = found[name] if layer is None else found[name][layer]
            progress.update(_add_products(total, [np.asarray(read(name, layer)) for read in ask]))
    return found


def _add_products(total: np.ndarray, weights: Sequence[np.ndarray]) -> int:
    """Adds what one array of every model contributes; returns its size. In a function of its own, so that nothing holds
    the arrays when the next ones are read."""
    flat = [weight.reshape(-1) for weight in weights]
    for start in range(0, flat[0].size, _BLOCK):
        block = np.stack([weight[start : start + _BLOCK].astype(np.float64) for weight in flat])
        block[1:] -= block[0]
        total += block @ block.T
    return flat[0].size


class Moves(NamedTuple):
    """(layer, module) -> dot products, see `measure`, summed over the weights of the group."""

    product: dict[Group, np.ndarray]

    def norm(self, k: int, group: Group) -> float:
        """Of the base's weights (0) or of an update."""
        return math.sqrt(self.product[group][k, k])

    def relative(self, k: int, group: Group) -> float | None:
        """The norm of an update in that of the base's weights; None where those are 0."""
        weights = self.norm(0, group)
        return self.norm(k, group) / weights if weights else None

    def share(self, k: int, group: Group) -> float | None:
        """Of the squared update of the whole model; None where there is no update."""
        whole = self.product[ALL, ALL][k, k]
        return float(self.product[group][k, k] / whole) if whole else None

    def angle(self, j: int, k: int, group: Group) -> float | None:
        """Between two updates, in degrees; None where one of them is 0."""
        norms = self.norm(j, group) * self.norm(k, group)
        if not norms:
            return None
        return math.degrees(math.acos(np.clip(self.product[group][j, k] / norms, -1.0, 1.0)))


def study(base: StoredModel, checkpoints: Sequence[Checkpoint]) -> Finding:
    """The updates of each checkpoint, and the angles between those of each two, by layer and module."""
    moves = Moves(sums_by_group(measure(base, checkpoints), base.arch))
    labels = [checkpoint.label for checkpoint in checkpoints]
    numbered = list(enumerate(labels, 1))
    pairs = list(itertools.combinations(numbered, 2))
    rows = []
    for layer, module in moves.product:
        group = (layer, module)
        where = {"layer": layer, "module": module}
        for k, label in numbered:
            row = {"checkpoint": label, "other": None, **where, "norm": moves.norm(k, group)}
            row |= {"relative_norm": moves.relative(k, group), "share": moves.share(k, group), "angle_degrees": None}
            rows.append(row)
        for (j, one), (k, other) in pairs:
            row = dict.fromkeys(rows[0]) | {"checkpoint": one, "other": other, **where}
            rows.append(row | {"angle_degrees": moves.angle(j, k, group)})
    said = [_where_it_is(moves, k, label, base.arch.num_layers) for k, label in numbered]
    angles = {(one, other): moves.angle(j, k, (ALL, ALL)) for (j, one), (k, other) in pairs}
    said += [
        f"the updates of {a} and {b} are {angle:.0f} degrees apart"
        for (a, b), angle in angles.items()
        if angle is not None
    ]
    return Finding(TITLE, "; ".join(said) + ".", rows, draw(moves, labels))


def _where_it_is(moves: Moves, k: int, label: str, num_layers: int) -> str:
    """How far an update went, and where it is large."""
    moved = moves.relative(k, (ALL, ALL))
    if not moved:
        return f"{label} has the base's weights"
    of_modules = {module: moves.relative(k, (ALL, module)) for layer, module in moves.product if layer == ALL}
    of_modules = {module: moved for module, moved in of_modules.items() if moved and module != ALL}
    most = sorted(of_modules, key=of_modules.get, reverse=True)[:2]
    shown = in_words([f"{module} ({of_modules[module]:.2%})" for module in most])
    first = sum(moves.share(k, (layer, ALL)) for layer in range(-(-num_layers // 3)))
    return (
        f"{label} moved the weights by {moved:.2%} of their norm, relative to them most in {shown}, and "
        f"{first:.0%} of the squared update is in the first third of the layers"
    )


def draw(moves: Moves, labels: Sequence[str]) -> Figure:
    """Above for each run a heat map of the relative norm, layer by module; below the relative norm and the angles by
    layer."""
    modules = [module for module in MODULES if (0, module) in moves.product]
    layers = sorted(layer for layer, module in moves.product if isinstance(layer, int) and module == ALL)
    columns = max(2, len(labels))
    figure, axes = new_figure(4.2 * columns, 7.0, 2, columns, gridspec_kw={"height_ratios": [3, 2]})
    maps = [
        [with_gaps([moves.relative(k, (layer, module)) for module in modules]) for layer in layers]
        for k in range(1, len(labels) + 1)
    ]
    highest = np.nanmax(maps)
    for of_run, label, map_axes in zip(maps, labels, axes[0], strict=False):
        image = map_axes.imshow(of_run, aspect="auto", origin="lower", vmin=0.0, vmax=highest, cmap="viridis")
        map_axes.set_xticks(range(len(modules)), modules, rotation=40, ha="right")
        map_axes.set_ylabel("layer")
        map_axes.grid(False)
        title(map_axes, label)
    bar = figure.colorbar(image, ax=axes[0, : len(labels)], format=PercentFormatter(1.0))
    bar.set_label("norm of the update, of the weights'", size=9)
    bar.ax.tick_params(labelsize=8.5)
    bar.outline.set_visible(False)
    curves, angles = axes[1, :2]
    for k, label in enumerate(labels, 1):
        curves.plot(layers, with_gaps([moves.relative(k, (l, ALL)) for l in layers]), label=label, **series(k))
    curves.set_ylabel("norm of the update, of the weights'")
    curves.yaxis.set_major_formatter(PercentFormatter(1.0))
    pairs = list(itertools.combinations(range(1, len(labels) + 1), 2))
    for i, (j, k) in enumerate(pairs):
        found = with_gaps([moves.angle(j, k, (l, ALL)) for l in layers])
        angles.plot(layers, found, label=f"{labels[j - 1]} and {labels[k - 1]}", **series(len(labels) + 1 + i))
    angles.set_ylabel("angle of the updates, degrees")
    for below in (curves, angles):
        below.set_xlabel("layer")
        below.set_ylim(0.0, 1.05 * below.get_ylim()[1])
        legend(below)
    for unused in [*axes[0, len(labels) :], *axes[1, 2:], *([] if pairs else [angles])]:
        unused.set_visible(False)
    return figure
