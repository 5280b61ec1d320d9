"""Causal attention of a whole sequence behind an optional shared prefix: plain XLA or a fused kernel.

This is training's and prefill's attention. A decode step, whose masks differ per example, is `attention.attend_own`'s.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import BlockSizes, CausalMask, MultiHeadMask, make_splash_mha
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nca_jax.axes import RULES, parts
from nca_jax.errors import UserError
from nca_jax.models.attention import KeyBlock, attend_own

_BATCH, _HEADS = RULES["batch"], RULES["heads"]

KINDS = ("xla", "splash", "cudnn")


def attention_kind(name: str, dtype: jnp.dtype = jnp.bfloat16) -> str:
    """The kind of attention that `name` stands for on this machine.

    Args:
      name: one of KINDS, or "auto": splash on a TPU, cudnn on a GPU, xla on a CPU.
      dtype: of the activations. "auto" is xla for float32 on a GPU, which cuDNN has no kernel for.

    Raises:
      UserError: any other name, or cudnn for float32 on a GPU.
    """
    if name not in (*KINDS, "auto"):
        raise UserError(f"attention {name!r} is not known; choose one of auto, {', '.join(KINDS)}.")
    backend = jax.default_backend()
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if name == "cudnn" and backend == "gpu" and not half:
        raise UserError(f"attention 'cudnn' computes in bfloat16 or float16, not {jnp.dtype(dtype)}; choose xla.")
    if name != "auto":
        return name
    return {"tpu": "splash", "gpu": "cudnn" if half else "xla"}.get(backend, "xla")


def attend_causal(
    q_BxTxHxQ: jax.Array,
    k_BxTxKxQ: jax.Array,
    v_BxTxKxQ: jax.Array,
    prefix: KeyBlock | None = None,
    kind: str = "xla",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Each token attends to all of the prefix, to itself and to the tokens before it.

    A row's padding on the right needs no mask, as no real token sees it. The kernels are fed the prefix once per
    example, so its gradient adds up over the examples.

    Args:
      prefix: keys and values [C, K, Q] that all examples share, without `visible`.
      kind: "xla" is `attend_own`; "splash" the Pallas kernel for TPUs, interpreted elsewhere; "cudnn" cuDNN's flash
        attention on a GPU, where it needs bfloat16 or float16, and jax's plain attention elsewhere.
      mesh: with axes "data", "fsdp" and "tensor", when the arrays are split over one: XLA cannot split a kernel, so it
        runs per device, over its examples and heads. A batch that the data axes do not divide, as the single row of a
        prefix being encoded, is computed whole by each of them. "xla" needs no mesh.

    Returns:
      [B, T, H, Q] in the dtype of the queries; scores and softmax are float32.
    """
    if kind == "xla":
        return attend_own(q_BxTxHxQ, [] if prefix is None else [prefix], k_BxTxKxQ, v_BxTxKxQ)

    # The mesh's devices, not the default backend: a program for TPUs may be compiled on a machine that has none.
    platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    run = functools.partial({"splash": _splash, "cudnn": _cudnn}[kind], platform=platform)
    shared = () if prefix is None else (prefix.k, prefix.v)
    if mesh is not None:
        rows = P(_BATCH if q_BxTxHxQ.shape[0] % parts(mesh, "batch") == 0 else None, None, _HEADS, None)
        in_specs = (rows, rows, rows, P(None, _HEADS, None))
        # Pallas calls do not say over which axes their outputs vary, so that cannot be checked.
        run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)
    return run(q_BxTxHxQ, k_BxTxKxQ, v_BxTxKxQ, shared)


def _splash(q_BxTxHxQ, k_BxTxKxQ, v_BxTxKxQ, shared, platform):
    """jax.experimental.pallas.ops.tpu.splash_attention. Query head h reads key head h // (H / K), as in `attend`."""
    _, T, H, Q = q_BxTxHxQ.shape
    k_BxSxKxQ, v_BxSxKxQ = _after_prefix(k_BxTxKxQ, v_BxTxKxQ, shared)
    S = k_BxSxKxQ.shape[1]
    block_q, block_kv = _block(T), _block(S)
    more_q, more_kv = -T % block_q, -S % block_kv

    # Query i sees keys up to C + i: of the keys that fill up the last block, those of the padding queries alone.
    mask = CausalMask((T + more_q, S + more_kv), offset=S - T)
    kernel = make_splash_mha(
        MultiHeadMask([mask] * H),
        block_sizes=BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=platform != "tpu",
    )
    heads_first = lambda x, more: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))).swapaxes(1, 2)  # noqa: E731
    out_BxHxTxQ = jax.vmap(kernel)(
        heads_first(q_BxTxHxQ * (Q**-0.5), more_q), heads_first(k_BxSxKxQ, more_kv), heads_first(v_BxSxKxQ, more_kv)
    )
    return out_BxHxTxQ.swapaxes(1, 2)[:, :T]


def _block(length: int) -> int:
    """The widest block of at most 512 whose padding adds no more than an eighth to what blocks of 128 would need."""
    return next(size for size in (512, 256, 128) if -(-length // size) * size <= 1.125 * (-(-length // 128) * 128))


def _cudnn(q_BxTxHxQ, k_BxTxKxQ, v_BxTxKxQ, shared, platform):
    """jax.nn.dot_product_attention, whose `is_causal` lets query i see keys up to i, and not up to C + i.

    So C queries of zeros go in front, and what they attend to is dropped. An explicit mask would say the same, but
    cuDNN takes masks as a bias: then it skips nothing of the hidden half, writes the bias's gradient, and refuses odd
    lengths in training.
    """
    T = q_BxTxHxQ.shape[1]
    k_BxSxKxQ, v_BxSxKxQ = _after_prefix(k_BxTxKxQ, v_BxTxKxQ, shared)
    q_BxSxHxQ = jnp.pad(q_BxTxHxQ, ((0, 0), (k_BxSxKxQ.shape[1] - T, 0), (0, 0), (0, 0)))
    implementation = "cudnn" if platform == "gpu" else "xla"
    out_BxSxHxQ = jax.nn.dot_product_attention(
        q_BxSxHxQ, k_BxSxKxQ, v_BxSxKxQ, is_causal=True, implementation=implementation
    )
    return out_BxSxHxQ[:, -T:]


def _after_prefix(k_BxTxKxQ, v_BxTxKxQ, shared):
    """Keys and values [B, C + T, K, Q]: the shared ones, if any, in front of each example's own."""
    if not shared:
        return k_BxTxKxQ, v_BxTxKxQ
    B = k_BxTxKxQ.shape[0]
    return tuple(
        jnp.concatenate([jnp.broadcast_to(first, (B, *first.shape)), own], axis=1)
        for first, own in zip(shared, (k_BxTxKxQ, v_BxTxKxQ), strict=True)
    )
