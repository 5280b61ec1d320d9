"""Chunked divergences against the same thing written densely."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_jax.objectives import Support
from nca_jax.vocab_loss import Distribution, token_divergences

N, V = 7, 12
WIDTHS = (8, 6, 8)  # of student, teacher and anchored: the teacher may be another model
VALID = np.array([1, 1, 0, 1, 1, 1, 0], bool)
FULL, TEMPERATURE = Support(), 0.7


def random_inputs(seed=0, rows=V):
    """Hidden states and heads of the three distributions; the anchored one has the student's head."""
    rng = np.random.default_rng(seed)
    hidden = [jnp.asarray(rng.normal(size=(N, D)), jnp.float32) for D in WIDTHS]
    student_head, teacher_head = (jnp.asarray(rng.normal(size=(rows, D)), jnp.float32) for D in WIDTHS[:2])
    return hidden, [student_head, teacher_head, student_head]


def dense(hidden, heads, kind="reverse_kl", support=FULL, temperature=TEMPERATURE):
    """The two terms from [N, V] probabilities, in products and logarithms of them only."""
    stop = jax.lax.stop_gradient
    probabilities = []
    for h, head in zip(hidden, heads, strict=True):
        e = jnp.exp(h @ head[:V].T / temperature)
        probabilities.append(e / e.sum(axis=1, keepdims=True))
    if support.kind == "top_k":
        ids = jnp.argsort(-stop(probabilities[0]), axis=1)[:, : support.k]
        inside = jax.nn.one_hot(ids, V).sum(axis=1)

        def choose(p):
            kept, rest = jnp.take_along_axis(p, ids, axis=1), (p * (1 - inside)).sum(axis=1, keepdims=True)
            choices = {"none": [kept], "renormalize": [kept / kept.sum(axis=1, keepdims=True)], "bucket": [kept, rest]}
            return jnp.concatenate(choices[support.tail], axis=1)

        probabilities = [choose(p) for p in probabilities]
    q, f, c = probabilities
    f = stop(f)
    kl = lambda a, b: (a * jnp.log(a / b)).sum(axis=1)  # noqa: E731
    jsd = (kl(q, (q + f) / 2) + kl(f, (q + f) / 2)) / 2
    opd = {"reverse_kl": kl(q, f), "forward_kl": kl(f, q), "jsd": jsd}[kind]
    return opd * VALID, kl(stop(q), c) * VALID


def chunked(
    hidden, heads, kind="reverse_kl", support=FULL, temperature=TEMPERATURE, chunk_size=3, vocab_size=V, valid=VALID
):
    return token_divergences(
        *(Distribution(h, head) for h, head in zip(hidden, heads, strict=True)),
        jnp.asarray(valid),
        kind=kind,
        support=support,
        temperature=temperature,
        vocab_size=vocab_size,
        chunk_size=chunk_size,
    )


def values_and_gradients(function, hidden, heads):
    """Both terms, and the gradients of a weighted sum of them to all hidden states and heads."""
    weights = jnp.linspace(1.0, 2.0, N)

    def loss(hidden, heads):
        opd, anchor = function(hidden, heads)
        return (weights * opd + weights[::-1] * anchor).sum(), (opd, anchor)

    (_, terms), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, heads)
    return terms, gradients


@functools.cache
def expected(kind="reverse_kl", support=FULL):
    return values_and_gradients(functools.partial(dense, kind=kind, support=support), *random_inputs())


def assert_as_dense(chunk_size=3, **settings):
    found = values_and_gradients(functools.partial(chunked, chunk_size=chunk_size, **settings), *random_inputs())
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), found, expected(**settings))


@pytest.mark.parametrize("chunk_size", [3, 7, 100], ids="chunks of {}".format)
def test_chunks_equal_the_dense_computation(chunk_size):
    assert_as_dense(chunk_size)


@pytest.mark.parametrize(
    "settings",
    [dict(kind="forward_kl"), dict(kind="jsd")]
    + [dict(support=Support("top_k", 4, tail)) for tail in ("none", "renormalize", "bucket")],
    ids=["forward_kl", "jsd", "none", "renormalize", "bucket"],
)
def test_every_divergence_and_support_equals_the_dense_computation(settings):
    assert_as_dense(**settings)


def test_known_values_through_an_identity_head_and_where_their_gradients_go():
    logits = [[2.0, 1.0, 0.0, -1.0], [0.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    hidden, heads = [jnp.array([x]) for x in logits], [jnp.eye(4)] * 3
    term = lambda i: lambda h: chunked(h, heads, temperature=1.0, vocab_size=4, valid=[True])[i].sum()  # noqa: E731
    opd, opd_gradient = jax.jit(jax.value_and_grad(term(0)))(hidden)
    anchor, anchor_gradient = jax.jit(jax.value_and_grad(term(1)))(hidden)
    np.testing.assert_allclose([opd, anchor], [0.9853647902, 0.2988049397], atol=1e-6)
    for gradient, expected in [
        (opd_gradient, ([0.687866, -0.457597, -0.168340, -0.061929], [0] * 4, [0] * 4)),
        (anchor_gradient, ([0] * 4, [0] * 4, [-0.346992, 0.060040, 0.209778, 0.077173])),
    ]:
        for found, right in zip(gradient, expected, strict=True):
            np.testing.assert_allclose(found[0], right, atol=1e-6)
            assert np.any(right) or not np.any(found)  # exactly 0, not nearly


def test_without_an_anchored_view_the_first_term_is_the_same():
    hidden, heads = random_inputs()
    opd, anchor = token_divergences(
        Distribution(hidden[0], heads[0]),
        Distribution(hidden[1], heads[1]),
        None,
        jnp.asarray(VALID),
        kind="reverse_kl",
        support=FULL,
        temperature=TEMPERATURE,
        vocab_size=V,
        chunk_size=3,
    )
    np.testing.assert_allclose(opd, chunked(hidden, heads)[0], rtol=1e-6)
    np.testing.assert_array_equal(anchor, 0)


@pytest.mark.parametrize("support", [FULL, Support("top_k", 4, "bucket")], ids=lambda s: s.kind)
def test_padded_vocabulary_is_cut_off(support):
    """Rows beyond the tokenizer's size change nothing, however probable, and get no gradient."""
    hidden, heads = random_inputs()
    padded = [jnp.concatenate([head, 50.0 * jnp.ones((5, head.shape[1]))]) for head in heads]
    run = functools.partial(chunked, support=support)
    terms, (to_hidden, to_heads) = values_and_gradients(run, hidden, heads)
    padded_terms, (padded_to_hidden, padded_to_heads) = values_and_gradients(run, hidden, padded)
    np.testing.assert_array_equal(padded_terms, terms)
    for a, b in zip(padded_to_hidden, to_hidden, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(padded_to_heads, to_heads, strict=True):
        np.testing.assert_array_equal(a, np.pad(b, ((0, 5), (0, 0))))


def test_a_top_k_beyond_the_vocabulary_is_all_of_it():
    hidden, heads = random_inputs()
    all_of_it = chunked(hidden, heads, support=Support("top_k", 1000, "renormalize"))
    np.testing.assert_allclose(all_of_it, chunked(hidden, heads), atol=1e-5)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_junk_in_masked_positions_reaches_no_value_and_no_gradient(junk):
    hidden, heads = random_inputs()
    dirty = [jnp.where(VALID[:, None], h, junk) for h in hidden]
    terms, gradients = values_and_gradients(chunked, hidden, heads)
    dirty_terms, dirty_gradients = values_and_gradients(chunked, dirty, heads)
    assert np.all(np.asarray(terms)[:, ~VALID] == 0) and np.all(np.asarray(terms)[:, VALID] > 0)
    jax.tree.map(np.testing.assert_array_equal, (dirty_terms, dirty_gradients), (terms, gradients))
    for h in gradients[0]:
        np.testing.assert_array_equal(h[~VALID], 0)


def test_bfloat16_hidden_states_give_float32_divergences():
    hidden, heads = random_inputs()
    half = [h.astype(jnp.bfloat16) for h in hidden], heads
    opd, anchor = chunked(*half)
    assert opd.dtype == anchor.dtype == jnp.float32
    # A CPU may keep more digits than it was asked for, so the program itself must not ask for bfloat16 logits.
    assert f"f32[3,{V}]" in (program := str(jax.make_jaxpr(chunked)(*half))) and f"bf16[3,{V}]" not in program
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (hidden, heads))
    np.testing.assert_allclose((opd, anchor), dense(*rounded), atol=1e-5)


def test_no_array_of_all_tokens_by_vocabulary():
    """Memory of the compiled gradient: the chunk's logits, and not those of all tokens."""
    tokens, vocabulary, width, chunk_size = 4096, 8192, 4, 64

    def loss(hidden, heads, valid):
        run = functools.partial(chunked, vocab_size=vocabulary, valid=valid)
        opd, anchor = run(hidden, heads, chunk_size=chunk_size)
        return opd.sum() + anchor.sum()

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    arguments = [shape((tokens, width))] * 3, [shape((vocabulary, width))] * 3, shape((tokens,), dtype=bool)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    # A few arrays per distribution are alive at one time; 64 chunks make up the tokens.
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocabulary * 4 / 4
