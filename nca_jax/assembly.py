"""From a config and two architectures to the functions of a job. Weights, tokenizers and data play no part, so that a
job can be built, checked and planned without them."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.axes import named, parts
from nca_jax.continuous import make_continuous_sampler
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, Past, decoder_graph, weight_table
from nca_jax.models.fused_attention import attention_kind
from nca_jax.models.layers import is_stacked, layer_sharding
from nca_jax.rollout import Rollout, make_sampler
from nca_jax.sharding import batch_sharding, like_params, make_decode_mesh, params_sharding
from nca_jax.train_step import Objective, Teacher, TrainState, make_train_step
from nca_jax.view_divergence import ViewDivergence, make_view_divergence
from nca_jax.views import Batch, Retained, View, shared_prefix


@dataclasses.dataclass(frozen=True)
class Answering:
    """What sampling from a model takes, in the decode layout: see `sharding.make_decode_mesh`.

    Attributes:
      mesh: on which it is done.
      sharding: weight name -> where it lies.
      layout: weights from wherever they lie, in whatever dtype -> the decode layout, matrices in the compute dtype. One
        jitted program, no copy through the host; on one device and with the right dtype the same arrays.
      encode: jitted (params, prefix_C) -> list with the prefix's keys and values.
      divergence: see `view_divergence.make_view_divergence`.
      sampler: top_k -> sample, see `rollout.make_sampler`; the same function for the same number. It takes rows from
        the host or from anywhere.
    """

    mesh: Mesh
    sharding: dict[str, NamedSharding]
    layout: Callable[[Params], Params]
    encode: Callable[[Params, jax.Array], list[Past]]
    divergence: ViewDivergence
    sampler: Callable[[int], Callable[..., Rollout]]


@dataclasses.dataclass(frozen=True)
class Job:
    """The functions of a training job.

    Attributes:
      student, teacher: for sampling.
      student_sharding, teacher_sharding: weight name -> where it lies in training.
      encode_teacher: jitted (params, prefix_C) -> list with the prefix's keys and values, as the step takes them.
      objective: the loss.
      micro_batches: that a step's batch is cut into.
      learning_rate: by step, from 0.
      initial_state: jitted, params (donated) -> TrainState, laid out on the mesh.
      train_step: jitted, (state (donated), teacher, batch) -> (state, metrics).
      abstract_state: shapes, dtypes and shardings of the state.
    """

    student: Answering
    teacher: Answering
    student_sharding: dict[str, NamedSharding]
    teacher_sharding: dict[str, NamedSharding]
    encode_teacher: Callable[[Params, jax.Array], list[Past]]
    objective: Objective
    micro_batches: int
    learning_rate: optax.Schedule
    initial_state: Callable[[Params], TrainState]
    train_step: Callable[[TrainState, Teacher, Batch], tuple[TrainState, dict[str, jax.Array]]]
    abstract_state: TrainState


def answering(config: ConfigDict, arch: Architecture, eos_ids: Sequence[int], vocab_size: int, mesh: Mesh) -> Answering:
    """The functions that sample from a model of this architecture.

    Args:
      config: of the job.
      arch: the model's.
      eos_ids: any of them ends a response.
      vocab_size: the tokenizer's size, at most the model's.
      mesh: the training mesh.

    Raises:
      UserError: the mesh does not divide a weight, or the attention kernel cannot run here.
    """
    dtype = settings.dtype(config.model.compute_dtype)
    mesh = make_decode_mesh(mesh, arch, dtype, config.mesh.decode_tensor, config.mesh.decode_gb)
    graph = _graph(config, arch, mesh)
    sharding = params_sharding(mesh, arch)
    drawing = {"max_new_tokens": config.rollout.max_new_tokens, "eos_ids": eos_ids, "vocab_size": vocab_size}
    slots = config.rollout.slots

    @cache
    def sampler(top_k: int) -> Callable[..., Rollout]:
        all_at_once = make_sampler(graph, **drawing, top_k=top_k)
        if not slots:
            return all_at_once
        # A quarter of the slots is prefilled at once, large enough a batch, and few of them wait for long; on a mesh as
        # many as the devices can share out.
        devices = parts(mesh, "batch")
        refill = min(slots, -(-max(1, slots // 4) // devices) * devices)
        in_slots = make_continuous_sampler(graph, **drawing, top_k=top_k, slots=slots, refill=refill)

        @jax.jit
        def sample(params: Params, prefix: list[Past], prompt_BxP, *rows) -> Rollout:
            return (in_slots if prompt_BxP.shape[0] > slots else all_at_once)(params, prefix, prompt_BxP, *rows)

        return sample

    # Training too casts matrices to the compute dtype, and leaves the final norm's scale as it is.
    table = weight_table(arch)
    matrices = {name for name, spec in table.items() if len(spec.shape) > 1}
    of_layer = {name: layer_sharding(spec, sharding[name]) for name, spec in table.items() if is_stacked(spec)}

    def cast(name: str, weight: jax.Array) -> jax.Array:
        return weight.astype(dtype) if name in matrices else weight

    @partial(jax.jit, out_shardings=sharding)
    def moved(params: Params) -> Params:
        """A layer at a time: all at once, whole weights of every layer would be on a device for a moment."""

        def one_layer(_, layer: Params):
            layer = {name: cast(name, weight) for name, weight in layer.items()}
            return None, jax.lax.with_sharding_constraint(layer, of_layer)

        _, stacked = jax.lax.scan(one_layer, None, {name: params[name] for name in of_layer})
        return {name: stacked[name] if name in stacked else cast(name, params[name]) for name in table}

    def layout(params: Params) -> Params:
        if mesh.size == 1 and all(params[name].dtype == dtype for name in matrices):
            return params
        return moved(params)

    divergence = make_view_divergence(graph, vocab_size=vocab_size, chunk_size=config.loss.chunk_size)
    return Answering(mesh, sharding, layout, _encoder(graph), divergence, sampler)


def _graph(config: ConfigDict, arch: Architecture, mesh: Mesh) -> nnx.GraphDef:
    dtype = settings.dtype(config.model.compute_dtype)
    attention = attention_kind(config.model.attention, dtype)
    return decoder_graph(arch, dtype, config.model.remat, attention=attention, mesh=mesh)


def _encoder(graph: nnx.GraphDef) -> Callable[[Params, jax.Array], list[Past]]:
    return jax.jit(lambda params, prefix_C: shared_prefix(nnx.merge(graph, params), prefix_C))


def assemble(
    config: ConfigDict,
    student: Architecture,
    teacher: Architecture,
    eos_ids: Sequence[int],
    vocab_size: int,
    mesh: Mesh,
) -> Job:
    """The functions of a training job; nothing is computed or allocated.

    Args and errors as `answering`; and a batch that the mesh does not divide.
    """
    micro_batches = settings.micro_batches(config, parts(mesh, "batch"))
    graph, teacher_graph = _graph(config, student, mesh), _graph(config, teacher, mesh)
    student_sharding, teacher_sharding = params_sharding(mesh, student), params_sharding(mesh, teacher)
    objective = settings.make_objective(config, vocab_size)
    optimizer, learning_rate = settings.make_optimizer(config)
    step = make_train_step(graph, teacher_graph, optimizer, objective, micro_batches, mesh, config.lengths)

    def initial_state(params: Params) -> TrainState:
        return TrainState(jnp.int32(0), params, optimizer.init(params), params if objective.teacher == "ema" else None)

    abstract = jax.eval_shape(initial_state, weight_table_arrays(student, config.model.param_dtype))
    replicated = named(mesh)
    sharding = like_params(abstract, student_sharding, replicated)
    return Job(
        student=answering(config, student, eos_ids, vocab_size, mesh),
        teacher=answering(config, teacher, eos_ids, vocab_size, mesh),
        student_sharding=student_sharding,
        teacher_sharding=teacher_sharding,
        encode_teacher=_encoder(teacher_graph),
        objective=objective,
        micro_batches=micro_batches,
        learning_rate=learning_rate,
        initial_state=jax.jit(initial_state, donate_argnums=0, out_shardings=sharding),
        train_step=jax.jit(step, donate_argnums=0, out_shardings=(sharding, replicated)),
        abstract_state=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, sharding
        ),
    )


def weight_table_arrays(arch: Architecture, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Weight name -> shape and dtype."""
    table = weight_table(arch, settings.dtype(dtype))
    return {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in table.items()}


def abstract_inputs(
    config: ConfigDict, job: Job, teacher: Architecture, mesh: Mesh, *, prompt: int, template: int, context: int
) -> tuple[TrainState, Teacher, Batch]:
    """The arguments of `job.train_step` as shapes, for building, compiling and planning it without data.

    Args:
      config, job, teacher, mesh: as given to and returned by `assemble`.
      prompt: P, tokens of the longest prompt without what leads all of them.
      template: tokens that lead every prompt of the no-context view.
      context: tokens that lead every prompt of the with-context view, and of retention's.
    """
    B, R = settings.rows(config), config.rollout.max_new_tokens
    place = batch_sharding(mesh)

    def of(shape: tuple[int, ...], dtype, sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def view(prefix: int) -> View:
        where = place.no_context
        return View(
            of((prefix,), jnp.int32, where.prefix_C),
            of((B, prompt), jnp.int32, where.prompt_BxP),
            of((B,), jnp.int32, where.prompt_length_B),
        )

    response = of((B, R), jnp.int32, place.response_BxR)
    mask = of((B, R), jnp.bool_, place.response_mask_BxR)
    retained = Retained(view(context), response, mask) if config.retention.gamma else None
    batch = Batch(view(template), view(context), response, mask, retained)
    if job.objective.teacher != "frozen":
        return job.abstract_state, Teacher(), batch
    params = {
        name: of(x.shape, x.dtype, job.teacher_sharding[name])
        for name, x in weight_table_arrays(teacher, config.teacher.dtype).items()
    }
    prefix = jax.eval_shape(job.encode_teacher, params, batch.with_context.prefix_C)
    return job.abstract_state, Teacher(params, prefix, prefix if retained else None), batch
