"""Our side: the functions that training calls, jitted and donated as training does.

The context is the shared prefix of its view: encoded once for the frozen teacher, once per step for the student.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nca_jax
from benchmarks.peers.inputs import Inputs, digest, load_inputs, load_positions
from benchmarks.peers.worker import peak_mb, reset_peak, serve, timed
from nca_jax.models.architecture import load_architecture
from nca_jax.models.decoder import decoder_graph
from nca_jax.models.huggingface import load_params
from nca_jax.objectives import Divergence
from nca_jax.rollout import Sampling, example_keys, make_sampler
from nca_jax.train_step import Objective, Teacher, TrainState, make_train_step
from nca_jax.views import Batch, View, shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Hidden, Terms, weighted_loss


def make_batch(inputs: Inputs) -> Batch:
    """The same tokens as `inputs.prompts`, with what leads all rows kept once."""
    prompts = (jnp.asarray(inputs.prompt_BxP), jnp.asarray(inputs.prompt_length_B))
    no_context, with_context = (View(jnp.asarray(lead), *prompts) for lead in (inputs.header_C, inputs.context_C))
    response_BxR = jnp.asarray(inputs.response_BxR)
    return Batch(no_context, with_context, response_BxR, jnp.ones(response_BxR.shape, bool))


def batch_digest(batch: Batch) -> str:
    """Of the rows in full: the prompts of both views, the responses."""
    rows = []
    for view in (batch.no_context, batch.with_context):
        lead, lengths = np.asarray(view.prefix_C).tolist(), np.asarray(view.prompt_length_B)
        rows += [[*lead, *row[:n].tolist()] for row, n in zip(np.asarray(view.prompt_BxP), lengths, strict=True)]
    return digest([*rows, *np.asarray(batch.response_BxR).tolist()])


class Compilations:
    """Counts programs that jax compiles."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, _: float, **__) -> None:
        self.count += event.endswith("backend_compile_duration")


class Ours:
    """The commands of this side.

    Args:
      directory: of the model.
    """

    def __init__(self, directory: str):
        self._arch = load_architecture(directory)
        self._params, self._graph = load_params(directory, self._arch), decoder_graph(self._arch)
        self._encode = jax.jit(lambda params, prefix_C: shared_prefix(nnx.merge(self._graph, params), prefix_C))
        self._compilations, self._index = Compilations(), 0
        self._samplers: dict[int, Callable] = {}

    def about(self) -> dict:
        packages = {"nca_jax": nca_jax.__version__, **{name: version(name) for name in ("jax", "flax", "optax")}}
        return {"packages": packages, "backend": jax.default_backend(), "compiles": True}

    def start_step(
        self, inputs: str, objective: str, beta: float, rollout: bool, recompute: bool, learning_rate: float
    ) -> dict:
        """Back to the initial parameters, with a new optimizer."""
        reset_peak()
        self._batch = make_batch(load_inputs(inputs))
        terms = Terms(vocab_size=self._arch.vocab_size, anchor=AnchorTerm() if objective == "nca" else None)
        goal = Objective(terms, beta=beta if objective == "nca" else 0.0)
        graph = decoder_graph(self._arch, remat="full" if recompute else "dots")
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))
        self._train_step = jax.jit(make_train_step(graph, graph, optimizer, goal), donate_argnums=0)
        # Not donated here, which makes copies: the teacher keeps the same weights.
        initial = jax.jit(lambda params: TrainState(jnp.int32(0), params, optimizer.init(params)))
        self._state = initial(self._params)
        self._teacher = Teacher(self._params, self._encode(self._params, self._batch.with_context.prefix_C))
        self._rollout = rollout
        jax.block_until_ready((self._state, self._teacher))
        return {"digest": batch_digest(self._batch)}

    def step(self) -> dict:
        """One step from what the one before has left."""
        before = self._compilations.count

        def run():
            batch = self._batch
            if self._rollout:
                R = batch.response_BxR.shape[1]
                drawn = self._draw(self._state.params, batch.no_context, R, 1.0)
                batch = batch.replace(response_BxR=drawn.response_BxR, response_mask_BxR=drawn.mask_BxR)
            return jax.block_until_ready(self._train_step(self._state, self._teacher, batch))

        seconds, (self._state, metrics) = timed(run)
        compiled = self._compilations.count - before
        return {"seconds": seconds, "loss": float(metrics["loss"]), "peak_mb": peak_mb(), "compilations": compiled}

    def start_sampling(self, inputs: str, rows: int, response: int) -> dict:
        """The prompts of the no-context view, of the first `rows` rows."""
        reset_peak()
        for name in ("_state", "_teacher", "_train_step"):  # what steps have left would count as memory of sampling
            self.__dict__.pop(name, None)
        batch = make_batch(load_inputs(inputs))
        self._view = jax.tree_util.tree_map_with_path(
            lambda path, x: x if "prefix" in str(path) else x[:rows], batch.no_context
        )
        self._response = response
        return {"digest": batch_digest(batch)}

    def sample(self, temperature: float) -> dict:
        """Draws a response for every row; no token ends one."""
        before = self._compilations.count
        seconds, drawn = timed(
            lambda: jax.block_until_ready(self._draw(self._params, self._view, self._response, temperature))
        )
        response = np.asarray(drawn.response_BxR).tolist()
        compiled = self._compilations.count - before
        return {"seconds": seconds, "response": response, "peak_mb": peak_mb(), "compilations": compiled}

    def start_loss(self, positions: str) -> dict:
        """KL(teacher || student) alone, averaged over the positions, with its gradient for hidden states and head."""
        reset_peak()
        given = load_positions(positions)
        N = len(given.token_N)
        student, teacher = (jnp.asarray(x)[None] for x in (given.student_NxD, given.teacher_NxD))
        head_VxD, token_1xN = jnp.asarray(given.head_VxD), jnp.asarray(given.token_N)[None]
        terms = Terms(vocab_size=len(given.head_VxD), first=Divergence("forward_kl"), chunk_size=256)
        weight_1xN = jnp.full((1, N), 1 / N, jnp.float32)

        # All are arguments: of constants the compiler would compute what follows from them once for all.
        def loss(q_x, head, f, teacher_head, token_1xN):
            return weighted_loss(Hidden(q_x, None, f), head, teacher_head, token_1xN, weight_1xN, 0.0, terms)[0]

        arguments = (student, head_VxD, teacher, head_VxD, token_1xN)
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        self._loss = lambda: jax.block_until_ready(compiled(*arguments))
        return {"temporary_mb": compiled.memory_analysis().temp_size_in_bytes // 10**6}

    def loss(self) -> dict:
        seconds, (value, _) = timed(self._loss)
        return {"seconds": seconds, "loss": float(value), "peak_mb": peak_mb()}

    def _draw(self, params, view: View, R: int, temperature: float):
        """As a training step's rollout: the prefix of the current parameters, then the sampler."""
        if R not in self._samplers:
            V = self._arch.vocab_size
            self._samplers[R] = make_sampler(self._graph, max_new_tokens=R, eos_ids=[V], vocab_size=V)
        B = len(view.prompt_length_B)
        self._index += 1
        keys = example_keys(0, self._index, jnp.arange(B))
        prefix = self._encode(params, view.prefix_C)
        active_B = np.ones(B, bool)
        return self._samplers[R](
            params, prefix, view.prompt_BxP, view.prompt_length_B, active_B, keys, Sampling(float(temperature), 1.0)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", help="of the model")
    side = Ours(parser.parse_args().directory)
    commands = ("about", "start_step", "step", "start_sampling", "sample", "start_loss", "loss")
    serve({name: getattr(side, name) for name in commands})


if __name__ == "__main__":
    main()
