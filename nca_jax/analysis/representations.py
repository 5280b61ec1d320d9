"""How alike the hidden states of the two views are, layer by layer, at the tokens of a response.

A model that has taken in its context computes the same with the context and without. Compared are the residual stream
after each layer, and the final hidden states, at the positions that predict the tokens of a response. Each model draws
its own responses without the context, as in evaluation. After the embedding the views are equal, and that is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

from nca_jax import settings
from nca_jax.analysis.common import (
    Checkpoint,
    Finding,
    Subject,
    decoder_on,
    in_words,
    micro_batch_rows,
    respond,
    sampling_words,
    with_gaps,
)
from nca_jax.axes import constrain
from nca_jax.data.chat import PackedView
from nca_jax.intervals import Estimate, estimates, mean
from nca_jax.models.decoder import Params, Past
from nca_jax.plotting import legend_below, new_figure, series
from nca_jax.views import Sight, View, at_response, response_streams

TITLE = "Hidden states of the two views"
FINAL = "final_norm"


def make_cosines(graph: nnx.GraphDef) -> Callable[..., jax.Array]:
    """Compiles once per shape of its arrays.

    Returns:
      cosines(params, prefixes, views, response_BxR, mask_BxR) -> float32 [B, L + 1], means over the response's tokens:
      after each layer, and after the final norm. `views` are two `views.View`s of the same prompts, `prefixes`
      what is encoded before them. Every process gives all rows and gets all values.
    """

    @jax.jit
    def cosines(params: Params, prefixes: Sequence[list[Past]], views: Sequence[View], response_BxR, mask_BxR):
        model = nnx.merge(graph, params)
        rows = partial(constrain, model.mesh)
        sights = [
            Sight(
                View(view.prefix_C, rows(view.prompt_BxP, "batch", None), rows(view.prompt_length_B, "batch")),
                prefix,
                rows(response_BxR, "batch", None),
            )
            for view, prefix in zip(views, prefixes, strict=True)
        ]

        def between(hidden: Sequence[jax.Array]) -> jax.Array:
            x_BxRxD, c_BxRxD = (
                at_response(h_BxTxD, sight).astype(jnp.float32) for h_BxTxD, sight in zip(hidden, sights, strict=True)
            )
            norms_BxR = jnp.linalg.norm(x_BxRxD, axis=-1) * jnp.linalg.norm(c_BxRxD, axis=-1)
            return jnp.sum(x_BxRxD * c_BxRxD, axis=-1) / norms_BxR

        outputs, of_layers_LxBxR = model.together(response_streams(sights), observe=between)
        final_BxR = between([hidden for hidden, _ in outputs])
        cosine_BxRxL = jnp.moveaxis(jnp.concatenate([of_layers_LxBxR, final_BxR[None]]), 0, -1)
        mask_BxRx1 = mask_BxR[..., None]
        mean_BxL = jnp.sum(jnp.where(mask_BxRx1, cosine_BxRxL, 0.0), axis=1) / jnp.maximum(mask_BxRx1.sum(axis=1), 1)
        return rows(mean_BxL, None, None)

    return cosines


class Agreement(NamedTuple):
    """What was measured of one checkpoint: cosines [E, L + 1] of each item, and the tokens of all responses."""

    cosine_ExL: np.ndarray
    tokens: int


def measure(subject: Subject, checkpoints: Sequence[Checkpoint]) -> list[Agreement]:
    """The cosines in each checkpoint, one model in memory after the other.

    They are loaded in the decode layout, in the compute dtype.
    """
    functions, config = subject.answering, subject.config
    cosines = make_cosines(decoder_on(config, subject.arch, functions.mesh))
    size = micro_batch_rows(subject, functions.mesh)
    measured = []
    with tqdm(total=len(checkpoints) * subject.items, desc="representations", unit="item", disable=None) as progress:
        for checkpoint in checkpoints:
            params = checkpoint.model.load(settings.dtype(config.model.compute_dtype), functions.sharding)
            response_ExR, mask_ExR = respond(subject, params, config.evaluation)
            views = (subject.no_context, subject.with_context)
            prefixes = [functions.encode(params, jnp.asarray(view.prefix_C)) for view in views]
            found = []
            for start in range(0, subject.items, size):
                # Rows past the end repeat the last item.
                index = np.minimum(np.arange(start, start + size), subject.items - 1)
                rows = [_view(view.rows(index)) for view in views]
                found.append(jax.device_get(cosines(params, prefixes, rows, response_ExR[index], mask_ExR[index])))
                progress.update(min(size, subject.items - start))
            cosine_ExL = np.concatenate(found)[: subject.items].astype(float)
            measured.append(Agreement(cosine_ExL, int(mask_ExR.sum())))
            del params, prefixes  # before the next one is loaded
    return measured


def _view(rows: PackedView) -> View:
    return View(rows.prefix_C, rows.prompt_ExP, rows.prompt_length_E)


def study(subject: Subject, checkpoints: Sequence[Checkpoint]) -> Finding:
    """The cosine of the views in each checkpoint, layer by layer."""
    L = subject.arch.num_layers
    # The first third has hardly read the context yet, and would hide what happens in the others.
    upper = slice(-(-L // 3), L)
    rows, said, curves = [], [], {}
    for checkpoint, (cosine_ExL, tokens) in zip(checkpoints, measure(subject, checkpoints), strict=True):
        quantities = dict(zip([*range(L), FINAL], map(mean, cosine_ExL.T), strict=True))
        found = estimates(quantities | {"upper": mean(cosine_ExL[:, upper].mean(axis=1))})
        said.append(f"{_with_interval(found.pop('upper'))} in {checkpoint.label}")
        curves[checkpoint.label] = list(found.values())
        for layer, (cosine, low, high, _) in found.items():
            row = {"checkpoint": checkpoint.label, "layer": layer, "cosine": cosine, "low": low, "high": high}
            rows.append(row | {"items": subject.items, "tokens": tokens})
    drawn = sampling_words(subject.config.evaluation)
    sentence = (
        f"Over the upper two thirds of the layers the hidden states of the two views agree to a cosine of "
        f"{in_words(said)} (95 % intervals over items), at the tokens of the responses to {subject.items} items that "
        f"each model drew {drawn} without the context."
    )
    return Finding(TITLE, sentence, rows, draw(curves))


def _with_interval(estimate: Estimate) -> str:
    interval = "" if estimate.low is None else f" ({estimate.low:.3f} to {estimate.high:.3f})"
    return f"{estimate.value:.3f}{interval}"


def draw(curves: Mapping[str, Sequence[Estimate]]) -> Figure:
    """One line with its band for each label; the final norm stands after the last layer."""
    figure, axes = new_figure(7.0, 3.8)
    for i, (label, found) in enumerate(curves.items()):
        style, places = series(i), range(len(found))
        value, low, high = map(with_gaps, list(zip(*found, strict=True))[:3])
        axes.plot(places, value, label=label, **style)
        axes.fill_between(places, low, high, color=style["color"], alpha=0.2, linewidth=0)
    last = len(found) - 1
    step = max(1, last // 8)
    ticks = range(0, last, step)
    axes.set_xticks([*ticks, last], [*map(str, ticks), "norm"])
    axes.set_xlabel("after layer")
    axes.set_ylabel("cosine of the two views")
    legend_below(axes)
    return figure
