"""Continuous batching: the responses of the padded sampler, in as many steps as the schedule by hand says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY_CONFIG
from flax import nnx

from nca_jax import continuous
from nca_jax.continuous import make_continuous_sampler
from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.decoder import decoder_graph, encode_prefix, random_params
from nca_jax.rollout import Sampling, draw, example_keys, make_sampler
from nca_jax.sharding import make_mesh, params_sharding

ARCH = architecture_from_config(TINY_CONFIG)
GRAPH = decoder_graph(ARCH)
N, P, R, VOCAB = 13, 8, 6, 259
# One token in four ends a response, so that lengths differ and some are 1.
EOS_IDS = tuple(range(0, VOCAB, 4))
SIZES = {"max_new_tokens": R, "eos_ids": EOS_IDS, "vocab_size": VOCAB, "top_k": 200}
INACTIVE = np.isin(np.arange(N), [0, 5, 6, 12])


@pytest.fixture(scope="module")
def params():
    # Twice, so that prompts matter to the tokens; four times gave logits whose rounding, divided by a temperature of
    # 0.3, was as large as the tolerance.
    return {name: 2 * weight for name, weight in random_params(ARCH, 0).items()}


@pytest.fixture(scope="module")
def padded():
    return make_sampler(GRAPH, **SIZES)


@pytest.fixture(scope="module")
def prefix(params):
    return jax.jit(lambda p: [encode_prefix(nnx.merge(GRAPH, p), jnp.arange(10, 15))])(params)


def rows(n=N, seed=0, active_N=None, sampling=Sampling(1.0, 1.0)):  # noqa: B008, a constant
    """Everything after params and prefix: random prompts of different lengths, each with a key of its own."""
    rng = np.random.default_rng(seed)
    prompt_NxP = rng.integers(3, VOCAB, (n, P)).astype(np.int32)
    length_N = (1 + (np.arange(n) + seed) % P).astype(np.int32)
    active_N = np.ones(n, bool) if active_N is None else active_N
    return prompt_NxP, length_N, active_N, example_keys(seed, 0, jnp.arange(n)), sampling


def same(one, other):
    one, other = jax.device_get((one, other))
    np.testing.assert_array_equal(one.response_BxR, other.response_BxR)
    np.testing.assert_array_equal(one.mask_BxR, other.mask_BxR)
    np.testing.assert_array_equal(one.truncated_B, other.truncated_B)
    np.testing.assert_allclose(one.log_prob_BxR, other.log_prob_BxR, atol=1e-5)


def steps_by_hand(lengths, slots, refill):
    """Prefills and decode steps of the schedule, one slot and one step at a time; the first token is the prefill's."""
    waiting, left, prefills, steps = list(lengths), [], 0, 0
    while waiting:
        prefills += 1
        left += [length - 1 for length in waiting[:refill] if length > 1]
        del waiting[:refill]
        while left and not (waiting and slots - len(left) >= refill):
            steps += 1
            left = [n - 1 for n in left if n > 1]
    return prefills, steps


@pytest.mark.parametrize(("slots", "refill", "prefixed"), [(4, 1, True), (4, 3, False), (16, 5, False)])
def test_responses_of_the_padded_sampler_in_the_steps_of_the_schedule(
    params, padded, prefix, monkeypatch, slots, refill, prefixed
):
    drawn, prefix = [], prefix if prefixed else []

    def counted(logits_BxV, *arguments):
        jax.debug.callback(lambda: drawn.append(len(logits_BxV)))
        return draw(logits_BxV, *arguments)

    monkeypatch.setattr(continuous, "draw", counted)
    sample = make_continuous_sampler(GRAPH, slots=slots, refill=refill, **SIZES)
    expected = jax.device_get(padded(params, prefix, *rows()))
    lengths = expected.mask_BxR.sum(axis=1)
    assert {1, R} <= set(lengths) and len(set(lengths)) > 3 and 0 < expected.truncated_B.sum() < N

    same(sample(params, prefix, *rows()), expected)
    jax.effects_barrier()
    prefills, steps = steps_by_hand(lengths, slots, refill)
    assert (drawn.count(refill), drawn.count(slots)) == (prefills, steps)
    padded_steps = sum(max(lengths[i : i + slots]) - 1 for i in range(0, N, slots))
    assert refill > 1 or steps < padded_steps, "and these are fewer than until the longest of each batch"

    some = rows(seed=3, active_N=~INACTIVE)
    same(sample(params, prefix, *some), padded(params, prefix, *some))


def test_nothing_is_compiled_again_for_other_lengths_temperatures_top_p_or_inactive_rows(params, padded):
    sample, compiled = make_continuous_sampler(GRAPH, slots=4, refill=2, **SIZES), []
    listener = lambda event, _, **__: compiled.append(event)  # noqa: E731
    varied = [
        rows(),
        rows(seed=4, sampling=Sampling(0.3, 0.9)),
        rows(seed=5, sampling=Sampling(0.0, 1.0), active_N=~INACTIVE),
        rows(seed=6, active_N=np.zeros(N, bool)),
    ]
    sample(params, [], *varied[0])
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        drawn = [sample(params, [], *arguments) for arguments in varied]
        assert not [event for event in compiled if "backend_compile" in event]
        sample(params, [], *rows(n=3))  # another shape, of fewer prompts than slots: the listener does see it
        assert any("backend_compile" in event for event in compiled)
    finally:
        jax.monitoring.clear_event_listeners()
    for rollout, arguments in zip(drawn, varied, strict=True):
        same(rollout, padded(params, [], *arguments))
    assert not drawn[-1].mask_BxR.any() and not drawn[-1].truncated_B.any()


@pytest.mark.parametrize(("slots", "refill"), [(8, 4), (3, 2)], ids=["shared out", "sizes that do not divide"])
def test_responses_on_a_mesh_are_those_of_one_device(params, padded, prefix, slots, refill):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sample = make_continuous_sampler(decoder_graph(ARCH, mesh=mesh), slots=slots, refill=refill, **SIZES)
    split = jax.device_put(params, params_sharding(mesh, ARCH))
    here = jax.device_put(prefix, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    rollout = sample(split, here, *rows(seed=1, active_N=~INACTIVE))
    same(rollout, padded(params, prefix, *rows(seed=1, active_N=~INACTIVE)))
    assert rollout.response_BxR.is_fully_replicated


def test_a_refill_beyond_the_slots_is_refused():
    with pytest.raises(ValueError, match="refill 5 is not between 1 and 4 slots"):
        make_continuous_sampler(GRAPH, slots=4, refill=5, **SIZES)
