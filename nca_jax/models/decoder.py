"""The Llama/Qwen decoder as a flax.nnx module: layers stacked along a leading axis and scanned.

Parameters live in a plain dict, name -> array, with the names, shapes and axes of `weight_table`; `nnx.merge(graph,
params)` makes the module of them inside a jitted function.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from nca_jax.axes import constrain
from nca_jax.models.architecture import Architecture
from nca_jax.models.attention import KeyBlock, attend_own
from nca_jax.models.contract import contract
from nca_jax.models.fused_attention import attend_causal
from nca_jax.models.rope import inverse_frequencies, rotate

Params = dict[str, jax.Array]
# Hidden states [B, T, D] after the final norm, and keys and values [L, B, T, K, Q] each.
Output = tuple[jax.Array, tuple[jax.Array, jax.Array]]

_NORMAL = nnx.initializers.normal(0.02)  # the families' initializer_range; one object, so that equal specs are equal


class WeightSpec(NamedTuple):
    """One row of the weight table. `axes` names each dimension for sharding.py; stacked weights lead with "layers"."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    initialiser: Callable
    dtype: jnp.dtype


def weight_table(arch: Architecture, dtype: jnp.dtype = jnp.float32) -> dict[str, WeightSpec]:
    """Every weight of the decoder: shape, logical axes, initialiser, dtype. The only place that lists them."""
    L, D, F, V = arch.num_layers, arch.hidden_size, arch.mlp_size, arch.vocab_size
    H, K, Q = arch.num_heads, arch.num_kv_heads, arch.head_dim
    normal, ones, zeros = _NORMAL, nnx.initializers.ones, nnx.initializers.zeros

    rows = {
        "embedding": ((V, D), ("vocab", "embed"), normal),
        "attention_norm": ((L, D), ("layers", "norm"), ones),
        "query": ((L, D, H, Q), ("layers", "embed", "heads", "head_dim"), normal),
        "key": ((L, D, K, Q), ("layers", "embed", "kv_heads", "head_dim"), normal),
        "value": ((L, D, K, Q), ("layers", "embed", "kv_heads", "head_dim"), normal),
        "output": ((L, H, Q, D), ("layers", "heads", "head_dim", "embed"), normal),
        "mlp_norm": ((L, D), ("layers", "norm"), ones),
        "gate": ((L, D, F), ("layers", "embed", "mlp"), normal),
        "up": ((L, D, F), ("layers", "embed", "mlp"), normal),
        "down": ((L, F, D), ("layers", "mlp", "embed"), normal),
        "final_norm": ((D,), ("norm",), ones),
    }
    if arch.qk_norm:
        rows["query_norm"] = ((L, Q), ("layers", "norm"), ones)
        rows["key_norm"] = ((L, Q), ("layers", "norm"), ones)
    if arch.qkv_bias:
        rows["query_bias"] = ((L, H, Q), ("layers", "heads", "head_dim"), zeros)
        rows["key_bias"] = ((L, K, Q), ("layers", "kv_heads", "head_dim"), zeros)
        rows["value_bias"] = ((L, K, Q), ("layers", "kv_heads", "head_dim"), zeros)
    if not arch.tied_head:
        rows["head"] = ((V, D), ("vocab", "embed"), normal)
    return {name: WeightSpec(*row, dtype) for name, row in rows.items()}


def parameter_count(arch: Architecture) -> int:
    """Of the whole decoder; a tied head counts once."""
    return sum(math.prod(spec.shape) for spec in weight_table(arch).values())


# What the backward pass keeps of a layer's forward pass; the rest is computed again.
REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Past(NamedTuple):
    """Keys and values, of all layers, that lie before a forward pass's own tokens.

    `k` and `v` are [L, B, S, K, Q], or [L, S, K, Q] for a prefix that all examples share. `visible` is bool [B, T, S]
    or [1, T, S]; None means that every query sees all of them. Keys are stored rotated to their own positions.
    """

    k: jax.Array
    v: jax.Array
    visible: jax.Array | None = None


class Stream(NamedTuple):
    """One batch for the layers.

    Attributes:
      token_BxT, position_BxT: its tokens and their positions.
      past: what lies before them, computed earlier.
      behind: which earlier stream of the same call lies before them too: a shared prefix, of one row.
      divided: of a batch of one: on a mesh every device computes its share of the tokens, if their number divides, and
        not all of them.
    """

    token_BxT: jax.Array
    position_BxT: jax.Array
    past: Sequence[Past] = ()
    behind: int | None = None
    divided: bool = False


class Decoder(nnx.Module):
    """tokens -> final hidden states; the head is applied by whoever needs logits, in chunks.

    Args:
      arch: sizes and switches.
      rngs: for random initial weights.
      param_dtype: dtype of the weights.
      compute_dtype: dtype of activations and matrix products; norms, softmax and rotations are float32.
      remat: a key of REMAT_POLICIES.
      attention: `kind` of fused_attention.attend_causal, for passes of more than one token over at most shared
        prefixes that all queries see. Any other pass, such as a decode step, is plain XLA.
      mesh: what the arrays are split over, if anything; kernels need to know.
    """

    def __init__(
        self,
        arch: Architecture,
        *,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype = jnp.float32,
        remat: str = "full",
        attention: str = "xla",
        mesh: Mesh | None = None,
    ):
        self.arch = arch
        self.compute_dtype = compute_dtype
        self.remat = remat
        self.attention = attention
        self.mesh = mesh
        for name, spec in weight_table(arch, param_dtype).items():
            setattr(self, name, nnx.Param(spec.initialiser(rngs.params(), spec.shape, spec.dtype)))

    def __call__(self, token_BxT: jax.Array, position_BxT: jax.Array, past: Sequence[Past] = ()) -> Output:
        """Runs the layers over tokens that attend causally to each other and to `past`.

        Right padding needs no mask: no real token sees what lies to its right.

        Returns:
          hidden_BxTxD after the final norm, in the compute dtype, and the tokens' own keys and values, each
          [L, B, T, K, Q].
        """
        return self.together([Stream(token_BxT, position_BxT, past)])[0]

    def together(
        self,
        streams: Sequence[Stream],
        observe: Callable[[list[jax.Array]], Any] | None = None,
    ) -> list[Output] | tuple[list[Output], Any]:
        """Runs several batches, of any shapes, through each layer in turn: the weights are read once for all of them,
        and their gradients added up layer by layer instead of as whole arrays.

        Args:
          streams: batches, of which one may see another as its prefix and nothing else.
          observe: what is to be known of the hidden states after each layer, the streams' [B, T, D] -> pytree. Only
            that is kept of them.

        Returns:
          as `__call__`, a list with one for each stream; with `observe` a pair of that and of what it has returned,
          stacked along L.
        """
        frequency = inverse_frequencies(self.arch.head_dim, self.arch.rope_theta, self.arch.rope_scaling)
        parted = self.mesh is not None and self.mesh.size > 1

        def layer(x, scanned):
            w, past_kv = scanned
            w = {name: weight.astype(self.compute_dtype) for name, weight in w.items()}
            outputs = []
            for x_BxTxD, stream, kv in zip(x, streams, past_kv, strict=True):
                blocks = [KeyBlock(k, v, past.visible) for (k, v), past in zip(kv, stream.past, strict=True)]
                if stream.behind is not None:
                    blocks.append(KeyBlock(*(self._whole_prefix(own) for own in outputs[stream.behind][1])))
                if stream.divided:
                    x_BxTxD = constrain(self.mesh, x_BxTxD, None, "prefix", None)
                divided = stream.divided and parted
                outputs.append(self._layer(x_BxTxD, w, blocks, stream.position_BxT, frequency, divided))
            x = [x_BxTxD for x_BxTxD, _ in outputs]
            return x, ([kv for _, kv in outputs], observe(x) if observe else None)

        table = weight_table(self.arch)
        stacked = {name: getattr(self, name)[...] for name, spec in table.items() if spec.axes[0] == "layers"}
        past_kv = [
            [(block.k.astype(self.compute_dtype), block.v.astype(self.compute_dtype)) for block in stream.past]
            for stream in streams
        ]
        x = [self._embed(stream) for stream in streams]
        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat], prevent_cse=False)
        x, (kv, observed) = jax.lax.scan(layer, x, (stacked, past_kv))
        outputs = [(self._norm(x_BxTxD, self.final_norm[...]), own) for x_BxTxD, own in zip(x, kv, strict=True)]
        return (outputs, observed) if observe else outputs

    def _embed(self, stream: Stream) -> jax.Array:
        """The tokens' rows of the embedding, [B, T, D] in the compute dtype."""
        # Said of the table so that it holds for its gradient: or else, where that is added to a tied head's, which lies
        # elsewhere, each device makes all of it.
        table_VxD = constrain(self.mesh, self.embedding[...], "vocab", "embed")
        x_BxTxD = table_VxD[stream.token_BxT].astype(self.compute_dtype)
        # Or else the compiler would look for a way from rows split along D to rows split along T.
        return constrain(self.mesh, x_BxTxD, None, None, None) if stream.divided else x_BxTxD

    def _whole_prefix(self, own_1xTxKxQ: jax.Array) -> jax.Array:
        """Keys or values [T, K, Q] of a prefix, on a mesh those of all its tokens on every device."""
        return constrain(self.mesh, own_1xTxKxQ[0], None, "kv_heads", None)

    def _layer(self, x_BxTxD, w, past: Sequence[KeyBlock], position_BxT, frequency, divided: bool):
        """One layer, with weights `w`, on one stream; `divided` over devices along its tokens."""
        T = x_BxTxD.shape[1]
        prefixes_only = all(block.k.ndim == 3 and block.visible is None for block in past)
        y_BxTxD = self._norm(x_BxTxD, w["attention_norm"])
        q_BxTxHxQ = self._project(y_BxTxD, w, "query", position_BxT, frequency)
        k_BxTxKxQ = self._project(y_BxTxD, w, "key", position_BxT, frequency)
        v_BxTxKxQ = self._project(y_BxTxD, w, "value")
        # A kernel cannot be split along its queries by the compiler, plain attention can.
        if self.attention != "xla" and T > 1 and prefixes_only and not divided:
            prefix = None
            if past:
                prefix = KeyBlock(jnp.concatenate([b.k for b in past]), jnp.concatenate([b.v for b in past]))
            attended_BxTxHxQ = attend_causal(
                q_BxTxHxQ, k_BxTxKxQ, v_BxTxKxQ, prefix, kind=self.attention, mesh=self.mesh
            )
        else:
            attended_BxTxHxQ = attend_own(q_BxTxHxQ, past, k_BxTxKxQ, v_BxTxKxQ, chunked=not divided)
        x_BxTxD += contract("bthq,hqd->btd", attended_BxTxHxQ, w["output"])

        y_BxTxD = self._norm(x_BxTxD, w["mlp_norm"])
        gate_BxTxF, up_BxTxF = (contract("btd,df->btf", y_BxTxD, w[name]) for name in ("gate", "up"))
        x_BxTxD += contract("btf,fd->btd", jax.nn.silu(gate_BxTxF) * up_BxTxF, w["down"])
        return x_BxTxD, (k_BxTxKxQ, v_BxTxKxQ)

    @property
    def head_VxD(self) -> jax.Array:
        """Weights of the output head, in the parameters' dtype: the embedding itself where the head is tied."""
        return self.embedding[...] if self.arch.tied_head else self.head[...]

    def _norm(self, x_Bx_xD: jax.Array, scale_D: jax.Array) -> jax.Array:
        """RMSNorm over the last axis, statistics in float32."""
        x = x_Bx_xD.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.arch.rms_norm_eps)
        return (x * scale_D.astype(jnp.float32)).astype(x_Bx_xD.dtype)

    def _project(self, x_BxTxD, w, name, position_BxT=None, frequency=None):
        """Queries, keys or values [B, T, heads, Q]: product, bias, norm, and rotation where a position is given."""
        out = contract("btd,dhq->bthq", x_BxTxD, w[name])
        if self.arch.qkv_bias:
            out += w[f"{name}_bias"]
        if position_BxT is None:
            return out
        if self.arch.qk_norm:
            out = self._norm(out, w[f"{name}_norm"])
        return rotate(out, position_BxT, frequency)


def decoder_graph(
    arch: Architecture,
    compute_dtype: jnp.dtype = jnp.float32,
    remat: str = "full",
    attention: str = "xla",
    mesh: Mesh | None = None,
) -> nnx.GraphDef:
    """The decoder without its weights; `nnx.merge(decoder_graph(...), params)` is the module."""
    switches = {"compute_dtype": compute_dtype, "remat": remat, "attention": attention, "mesh": mesh}
    model = nnx.eval_shape(lambda: Decoder(arch, rngs=nnx.Rngs(0), **switches))
    return nnx.split(model)[0]


def random_params(arch: Architecture, seed: int, dtype: jnp.dtype = jnp.float32) -> Params:
    """Freshly initialised weights, each drawn from its own key."""
    return nnx.to_pure_dict(nnx.state(Decoder(arch, rngs=nnx.Rngs(seed), param_dtype=dtype)))


def prefix_stream(prefix_C: jax.Array) -> Stream:
    """Tokens that lead every example, at positions 0..C-1; on a mesh the devices share the work."""
    return Stream(prefix_C[None], jnp.arange(prefix_C.shape[0])[None], divided=True)


def encode_prefixes(model: Decoder, prefixes: Sequence[jax.Array]) -> list[Past]:
    """Keys and values [L, C, K, Q] of tokens that lead every example, at positions 0..C-1, computed once.

    On the model's mesh the work is divided over the devices, and each gets the keys and values of all tokens.

    Args:
      model: whose keys and values.
      prefixes: token ids [C], of any lengths above 0.
    """
    return [
        Past(*(constrain(model.mesh, x[:, 0], None, None, "kv_heads", None) for x in kv))
        for _, kv in model.together([prefix_stream(prefix_C) for prefix_C in prefixes])
    ]


def encode_prefix(model: Decoder, prefix_C: jax.Array) -> Past:
    """`encode_prefixes` of one."""
    return encode_prefixes(model, [prefix_C])[0]
