"""Sampling: against one teacher-forced forward pass, and independent of how rows are batched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, TINY_CONFIG
from flax import nnx

from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.decoder import decoder_graph
from nca_jax.models.huggingface import load_params
from nca_jax.objectives import log_probabilities
from nca_jax.rollout import Sampling, _nucleus, block_sizes, draw, example_keys, make_sampler, response_mask
from nca_jax.views import Sight, View, response_hidden, shared_prefix

R, VOCAB = 6, 259
ARCH = architecture_from_config(TINY_CONFIG)
GRAPH = decoder_graph(ARCH)


@pytest.fixture(scope="module")
def params(tiny_model):
    return load_params(tiny_model, ARCH)


def prompts(lengths, width, seed=0):
    """Random right-padded prompts of the given lengths, the same rows whatever the width."""
    rng = np.random.default_rng(seed)
    prompt_BxP = np.zeros((len(lengths), width), np.int32)
    for row, n in zip(prompt_BxP, lengths, strict=True):
        row[:n] = rng.integers(3, VOCAB, n)
    return prompt_BxP, np.array(lengths, np.int32)


def sampler(eos_ids=(EOS,), **kwargs):
    return make_sampler(GRAPH, max_new_tokens=R, eos_ids=eos_ids, vocab_size=VOCAB, **kwargs)


def run(sample, params, prompt_BxP, length_B, index_B, temperature=1.0, top_p=1.0, prefix=(), active_B=None):
    active_B = np.ones(len(length_B), bool) if active_B is None else active_B
    keys = example_keys(7, 3, jnp.asarray(index_B))
    out = sample(params, list(prefix), prompt_BxP, length_B, active_B, keys, Sampling(temperature, top_p))
    return jax.device_get(out)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("prefix_length", [0, 5])
def test_log_probabilities_equal_one_teacher_forced_forward(params, temperature, prefix_length):
    prompt_BxP, length_B = prompts([3, 8, 1], 8)
    prefix_C = jnp.arange(10, 10 + prefix_length)
    prefix = shared_prefix(nnx.merge(GRAPH, params), prefix_C)
    out = run(sampler(), params, prompt_BxP, length_B, [0, 1, 2], temperature, prefix=prefix)

    model = nnx.merge(GRAPH, params)
    sight = Sight(View(prefix_C, prompt_BxP, length_B), prefix, jnp.asarray(out.response_BxR))
    (hidden_BxRxD,) = response_hidden(model, [sight])
    log_p_BxRxV = log_probabilities(hidden_BxRxD @ model.head_VxD[:VOCAB].T, temperature)
    expected_BxR = np.take_along_axis(np.asarray(log_p_BxRxV), out.response_BxR[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.log_prob_BxR, expected_BxR * out.mask_BxR, atol=1e-4)
    assert out.mask_BxR.sum() > 3


def test_greedy_takes_the_most_probable_token_of_the_forward_pass(params):
    prompt_BxP, length_B = prompts([4, 6], 8)
    out = run(sampler(), params, prompt_BxP, length_B, [0, 1], temperature=0.0)
    model = nnx.merge(GRAPH, params)
    view = View(jnp.zeros(0, jnp.int32), prompt_BxP, length_B)
    (hidden_BxRxD,) = response_hidden(model, [Sight(view, [], jnp.asarray(out.response_BxR))])
    logits_BxRxV = hidden_BxRxD @ model.head_VxD[:VOCAB].T
    np.testing.assert_array_equal(out.response_BxR, np.argmax(logits_BxRxV, -1) * out.mask_BxR)


def test_a_row_is_sampled_alike_alone_in_a_batch_and_with_wider_padding(params):
    prompt_BxP, length_B = prompts([3, 8, 5, 1], 8)
    together = run(sampler(), params, prompt_BxP, length_B, [0, 1, 2, 3])
    assert len({tuple(row) for row in together.response_BxR}) == 4
    for i in range(4):
        padded = np.pad(prompt_BxP[i : i + 1], ((0, 0), (0, 8)))
        alone = run(sampler(), params, padded, length_B[i : i + 1], [i])
        np.testing.assert_array_equal(alone.response_BxR[0], together.response_BxR[i])


def test_keys_differ_by_seed_step_and_example():
    def bits(seed, step, index):
        return tuple(jax.random.key_data(example_keys(seed, step, jnp.array([index]))[0]).tolist())

    assert len({bits(0, 0, 0), bits(1, 0, 0), bits(0, 1, 0), bits(0, 0, 1)}) == 4


def test_nothing_is_compiled_again_for_other_lengths_temperatures_top_p_or_inactive_rows(params):
    sample, compiled = sampler(), []
    listener = lambda event, _, **__: compiled.append(event)  # noqa: E731
    prompt_BxP, length_B = prompts([3, 8, 5, 1], 8)
    arguments = [
        dict(temperature=1.0, top_p=1.0),
        dict(temperature=0.3, top_p=0.9),
        dict(temperature=0.0, active_B=np.array([True, True, False, False])),
    ]
    run(sample, params, prompt_BxP, length_B, [0, 1, 2, 3], **arguments[0])
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for kwargs in arguments:
            run(sample, params, *prompts([2, 7, 6, 4], 8), [4, 5, 6, 7], **kwargs)
        again = [event for event in compiled if "backend_compile" in event]
        assert not again
        run(sample, params, *prompts([2, 7, 6, 4], 16), [4, 5, 6, 7])  # another bucket: the listener does see it
        assert any("backend_compile" in event for event in compiled)
    finally:
        jax.monitoring.clear_event_listeners()


def test_inactive_rows_are_empty_and_do_not_change_the_others(params):
    prompt_BxP, length_B = prompts([3, 8], 8)
    both = run(sampler(), params, prompt_BxP, length_B, [0, 1])
    one = run(sampler(), params, prompt_BxP, length_B, [0, 1], active_B=np.array([True, False]))
    np.testing.assert_array_equal(one.response_BxR[0], both.response_BxR[0])
    assert not one.mask_BxR[1].any() and not one.truncated_B[1] and not one.log_prob_BxR[1].any()


def test_any_token_of_the_eos_set_ends_a_response_and_padding_is_zero(params):
    prompt_BxP, length_B = prompts([3, 8, 5, 1], 8)
    free = run(sampler(eos_ids=(VOCAB + 5,)), params, prompt_BxP, length_B, [0, 1, 2, 3])
    assert free.truncated_B.all() and free.mask_BxR.all()
    stops = (int(free.response_BxR[0, 2]), int(free.response_BxR[1, 0]))
    out = run(sampler(eos_ids=stops), params, prompt_BxP, length_B, [0, 1, 2, 3])
    for row in range(4):
        hits = np.isin(free.response_BxR[row], stops)
        length = hits.argmax() + 1 if hits.any() else R
        np.testing.assert_array_equal(out.mask_BxR[row], np.arange(R) < length)
        np.testing.assert_array_equal(out.response_BxR[row], free.response_BxR[row] * out.mask_BxR[row])
        assert out.truncated_B[row] == (not hits.any())
    assert out.mask_BxR[1].sum() == 1  # an immediate EOS is a response of one token


def test_decoding_stops_when_all_rows_are_done(params):
    prompt_BxP, length_B = prompts([3, 8], 8)
    everything = tuple(range(VOCAB))
    out = run(sampler(eos_ids=everything), params, prompt_BxP, length_B, [0, 1])
    assert (out.mask_BxR.sum(axis=1) == 1).all()
    text = sampler(eos_ids=everything).lower(
        params, [], prompt_BxP, length_B, np.ones(2, bool), example_keys(0, 0, jnp.arange(2)), Sampling(1.0, 1.0)
    )
    assert "while" in text.as_text()  # a while loop, not a loop over all R slots


def test_mask_when_the_padding_token_is_also_the_end_token():
    mask, truncated = response_mask(jnp.array([[5, 7, 2, 2, 2], [5, 7, 8, 9, 4]]), [2])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(truncated, [False, True])


def draws(logits, n=4000, top_k=0, **sampling):
    logits_BxV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
    keys = example_keys(0, 0, jnp.arange(n))
    token_B, log_prob_B = draw(logits_BxV, keys, Sampling(**sampling), top_k)
    return np.bincount(token_B, minlength=len(logits)) / n, np.asarray(log_prob_B)


def test_temperature_divides_the_logits():
    share, _ = draws([2.0, 1.0, 0.0, -1.0], temperature=2.0)
    expected = np.exp(np.array([1.0, 0.5, 0.0, -0.5]))
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.03)


def test_top_k_and_top_p_leave_only_the_most_probable_tokens():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    np.testing.assert_allclose(draws(logits, top_k=2)[0], [0, 4 / 7, 3 / 7, 0], atol=0.03)
    np.testing.assert_allclose(draws(logits, top_p=0.65)[0], [0, 4 / 7, 3 / 7, 0], atol=0.03)
    # top-p counts the mass that top-k left: .4 / .7 is below .6, so a second token is kept.
    np.testing.assert_allclose(draws(logits, top_k=2, top_p=0.6)[0], [0, 4 / 7, 3 / 7, 0], atol=0.03)
    np.testing.assert_allclose(draws(logits, top_p=1e-6)[0], [0, 1, 0, 0])


def test_log_probabilities_are_those_before_the_filters():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    _, log_prob = draws(logits, top_k=1)
    np.testing.assert_allclose(log_prob, np.log(0.4), rtol=1e-5)


def test_padded_vocabulary_is_never_sampled(params):
    """The head has 272 rows and the tokenizer 259 tokens; give the padded rows the highest logits of all."""
    loud = params | {"embedding": params["embedding"].at[VOCAB:].set(100.0 * params["final_norm"])}
    prompt_BxP, length_B = prompts([3, 8, 5, 1], 8)
    assert run(sampler(), loud, prompt_BxP, length_B, [0, 1, 2, 3]).response_BxR.max() < VOCAB


def test_sizes_of_the_blocks_of_the_response_cache():
    assert block_sizes(1024, 64) == [64, 64, 128, 256, 512]
    assert block_sizes(200, 64) == [64, 64, 72]
    assert block_sizes(65, 64) == [64, 1]
    assert block_sizes(64, 64) == [64]
    assert block_sizes(6, 64) == [6]


def long_sampler(first_block, eos_ids):
    return make_sampler(GRAPH, max_new_tokens=20, eos_ids=eos_ids, vocab_size=VOCAB, first_block=first_block)


def test_a_cache_in_blocks_gives_the_responses_of_a_whole_one(params):
    """20 tokens in blocks of 3, 3, 6 and 8; rows end in different blocks, or in none."""
    prompt_BxP, length_B = prompts([3, 8, 5, 1, 7, 2], 8)
    prefix = shared_prefix(nnx.merge(GRAPH, params), jnp.arange(10, 15))
    eos_ids = range(0, VOCAB, 16)
    blocks, whole = long_sampler(3, eos_ids), long_sampler(20, eos_ids)
    for temperature in (0.0, 1.5):
        out, expected = (
            run(sample, params, prompt_BxP, length_B, range(6), temperature, prefix=prefix)
            for sample in (blocks, whole)
        )
        np.testing.assert_array_equal(out.response_BxR, expected.response_BxR)
        np.testing.assert_array_equal(out.mask_BxR, expected.mask_BxR)
        np.testing.assert_array_equal(out.truncated_B, expected.truncated_B)
        np.testing.assert_allclose(out.log_prob_BxR, expected.log_prob_BxR, atol=1e-5)
    lengths = expected.mask_BxR.sum(axis=1)
    assert lengths.min() < 6 and lengths.max() == 20 and len(set(lengths)) > 3


def test_no_step_is_given_more_of_the_cache_than_has_begun(params):
    """The last block of 64 in blocks of 8, 8, 16 and 32 is 32 long, and no array of keys has all 64."""
    prompt_BxP, length_B = prompts([3, 8], 8)
    arguments = params, [], prompt_BxP, length_B, np.ones(2, bool), example_keys(0, 0, jnp.arange(2)), Sampling()

    def lengths(first_block):
        sample = make_sampler(GRAPH, max_new_tokens=64, eos_ids=(EOS,), vocab_size=VOCAB, first_block=first_block)
        text = str(jax.make_jaxpr(sample)(*arguments))
        return {n for n in (8, 16, 32, 64) if f"f32[2,2,{n},2,16]" in text}

    assert lengths(8) == {8, 16, 32}
    assert lengths(64) == {8, 64}  # the prompt's 8


def in_nucleus(p_V, top_p):
    """Plain numpy in float64: the fewest most probable tokens that hold top_p, and those as probable as the last."""
    descending = np.sort(p_V)[::-1]
    count = 1 + np.searchsorted(np.cumsum(descending), top_p * (1 - 1e-12))
    return p_V >= descending[min(count, len(p_V)) - 1]


def distributions(V):
    """[rows, V], of very different shapes: most of them need all of the vocabulary for some top-p."""
    rng = np.random.default_rng(0)
    tied = np.array([0.3] + [0.6 / 20] * 20 + [0.1 / (V - 21)] * (V - 21))
    halves = 0.5 ** np.minimum(np.arange(1, V + 1), 20)  # 1/2, 1/4, 1/8, ...
    wide = rng.dirichlet(np.full(V, 0.3), 3)
    peaked = rng.dirichlet(np.full(V, 0.01), 3)
    rest = np.full(V, 1 / V), np.eye(V)[7], rng.permutation(tied), rng.permutation(halves / halves.sum())
    return np.concatenate([wide, peaked, np.stack(rest)])


@pytest.mark.parametrize("each_alone", [True, False], ids=["alone", "in one batch"])
def test_the_nucleus_is_that_of_a_full_sort(each_alone):
    V, candidates = 300, 32
    p_BxV = distributions(V)
    log_p_BxV = jnp.log(jnp.asarray(p_BxV, jnp.float32))
    kept = jax.jit(_nucleus, static_argnums=2)
    # On both sides of 1/2, 3/4, of the tied tokens' 0.3 and 0.9, and of what the candidates hold.
    held_B = np.sort(p_BxV, axis=1)[:, -candidates:].sum(axis=1)
    edges = np.array([0.5, 0.75, 0.3, 0.9, *held_B[held_B < 0.999]])
    assert len(edges) > 6
    for top_p in (1e-6, 0.2, 0.99, 0.9999, *(edges - 1e-4), *(edges + 1e-4)):
        expected_BxV = np.stack([in_nucleus(p_V, top_p) for p_V in p_BxV])
        for columns in (candidates, V):
            parts = np.split(log_p_BxV, len(p_BxV)) if each_alone else [log_p_BxV]
            found_BxV = np.concatenate([kept(part, jnp.float32(top_p), columns) for part in parts])
            np.testing.assert_array_equal(found_BxV > -np.inf, expected_BxV & (p_BxV > 0), err_msg=str(top_p))


def test_at_a_boundary_the_nucleus_does_not_depend_on_how_it_is_found():
    """Where top-p is a sum of probabilities exactly, rounding decides, and has to decide alike."""
    log_p_BxV = jnp.log(jnp.asarray(distributions(300), jnp.float32))
    kept = jax.jit(_nucleus, static_argnums=2)
    boundaries = np.cumsum(np.sort(np.exp(log_p_BxV), axis=1)[:, ::-1], axis=1)[:, :24:3]
    for row, top_p in [(row, p) for row, ps in enumerate(boundaries) for p in ps if p < 1]:
        one, all_ = (kept(log_p_BxV[row : row + 1], jnp.float32(top_p), n) for n in (32, 300))
        np.testing.assert_array_equal(one, all_, err_msg=f"row {row}, top_p {top_p}")


@pytest.mark.parametrize("top_k", [0, 20, 100])
@pytest.mark.parametrize("top_p", [0.6, 0.95, 1.0])
def test_tokens_are_those_drawn_from_the_nucleus_with_the_same_keys(top_k, top_p):
    rng = np.random.default_rng(1)
    B, V = 500, 300
    logits_BxV = rng.normal(0, rng.uniform(0.5, 4, (B, 1)), (B, V)).astype(np.float32)
    keys = example_keys(0, 0, jnp.arange(B))
    token_B, _ = draw(logits_BxV, keys, Sampling(1.0, top_p), top_k, candidates=64)

    p_BxV = np.exp(logits_BxV.astype(np.float64))
    if top_k:
        p_BxV = np.where(p_BxV >= np.sort(p_BxV, axis=1)[:, -top_k, None], p_BxV, 0)
    p_BxV /= p_BxV.sum(axis=1, keepdims=True)
    if top_p < 1:
        p_BxV = np.where(np.stack([in_nucleus(p_V, top_p) for p_V in p_BxV]), p_BxV, 0)
    left_BxV = jnp.where(p_BxV > 0, jax.nn.log_softmax(logits_BxV), -jnp.inf)
    np.testing.assert_array_equal(token_B, jax.vmap(jax.random.categorical)(keys, left_BxV))
