"""From a config and two architectures to the functions of a job. Weights, tokenizers and data play no part, so that a
job can be built, checked and planned without them."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.axes import named
from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params, Past, decoder_graph, weight_table
from nca_jax.models.fused_attention import attention_kind
from nca_jax.rollout import Rollout, make_sampler
from nca_jax.sharding import batch_sharding, like_params, params_sharding
from nca_jax.train_step import Batch, Objective, Retained, Teacher, TrainState, View, make_train_step, shared_prefix


@dataclasses.dataclass(frozen=True)
class Answering:
    """What sampling from a model takes.

    Attributes:
      graph: the decoder without weights.
      sharding: weight name -> where it lies.
      encode: jitted (params, prefix_C) -> list with the prefix's keys and values.
      sampler: top_k -> sample, see `rollout.make_sampler`; the same function for the same number.
    """

    graph: nnx.GraphDef
    sharding: dict[str, NamedSharding]
    encode: Callable[[Params, jax.Array], list[Past]]
    sampler: Callable[[int], Callable[..., Rollout]]


@dataclasses.dataclass(frozen=True)
class Job:
    """The functions of a training job.

    Attributes:
      student, teacher: for sampling.
      objective: the loss.
      learning_rate: by step, from 0.
      initial_state: jitted, params (donated) -> TrainState, laid out on the mesh.
      train_step: jitted, (state (donated), teacher, batch) -> (state, metrics).
      abstract_state: shapes, dtypes and shardings of the state.
    """

    student: Answering
    teacher: Answering
    objective: Objective
    learning_rate: optax.Schedule
    initial_state: Callable[[Params], TrainState]
    train_step: Callable[[TrainState, Teacher, Batch], tuple[TrainState, dict[str, jax.Array]]]
    abstract_state: TrainState


def answering(
    config: ConfigDict, arch: Architecture, eos_ids: Sequence[int], vocab_size: int, mesh: Mesh, remat: str = "full"
) -> Answering:
    """The functions that sample from a model of this architecture.

    Args:
      config: of the job.
      arch: the model's.
      eos_ids: any of them ends a response.
      vocab_size: the tokenizer's size, at most the model's.
      mesh: where everything lies.
      remat: what a backward pass through the graph recomputes.

    Raises:
      UserError: the mesh does not divide a weight, or the attention kernel cannot run here.
    """
    dtype = settings.dtype(config.model.compute_dtype)
    graph = decoder_graph(arch, dtype, remat, attention=attention_kind(config.model.attention, dtype), mesh=mesh)
    samplers = {}

    def sampler(top_k: int) -> Callable[..., Rollout]:
        if top_k not in samplers:
            samplers[top_k] = make_sampler(
                graph,
                max_new_tokens=config.rollout.max_new_tokens,
                eos_ids=eos_ids,
                vocab_size=vocab_size,
                top_k=top_k,
            )
        return samplers[top_k]

    encode = jax.jit(lambda params, prefix_C: shared_prefix(nnx.merge(graph, params), prefix_C))
    return Answering(graph, params_sharding(mesh, arch), encode, sampler)


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
    rows, devices = settings.rows(config) // config.accumulation, mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % devices:
        raise UserError(
            f"the {rows} rows of a micro-batch do not divide over the data x fsdp mesh {dict(mesh.shape)}; change "
            "config.batch_size, config.accumulation or config.mesh."
        )
    built = partial(answering, config, eos_ids=eos_ids, vocab_size=vocab_size, mesh=mesh)
    student_side, teacher_side = built(student, remat=config.model.remat), built(teacher)
    objective = settings.make_objective(config, vocab_size)
    optimizer, learning_rate = settings.make_optimizer(config)
    step = make_train_step(student_side.graph, teacher_side.graph, optimizer, objective, config.accumulation, mesh)

    def initial_state(params: Params) -> TrainState:
        return TrainState(jnp.int32(0), params, optimizer.init(params), params if objective.teacher == "ema" else None)

    abstract = jax.eval_shape(initial_state, weight_table_arrays(student, config.model.param_dtype))
    replicated = named(mesh)
    sharding = like_params(abstract, student_side.sharding, replicated)
    return Job(
        student=student_side,
        teacher=teacher_side,
        objective=objective,
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
        name: of(x.shape, x.dtype, job.teacher.sharding[name])
        for name, x in weight_table_arrays(teacher, config.teacher.dtype).items()
    }
    prefix = jax.eval_shape(job.teacher.encode, params, batch.with_context.prefix_C)
    return job.abstract_state, Teacher(params, prefix, prefix if retained else None), batch
