"""The one-pass loss against the same thing written densely and differentiated automatically, in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_jax.objectives import Divergence, Support
from nca_jax.sharding import make_mesh
from nca_jax.vocab_loss import AnchorTerm, Hidden, Terms, weighted_loss

B, R, V = 4, 5, 12
WIDTHS = {"q_x": 8, "q_c": 8, "f": 6}  # the teacher may be another model
TOKENS = np.random.default_rng(7).integers(0, V, (B, R))
MASK = np.arange(R) < np.array([5, 0, 3, 1])[:, None]
WEIGHTS = MASK * np.random.default_rng(8).uniform(0.5, 1.5, (B, R))
BETA = 0.7
NCA = Terms(vocab_size=V, anchor=AnchorTerm(), temperature=0.7, chunk_size=8)


def random_inputs(seed=0, rows=V):
    """Hidden states, the student's head, the teacher's head."""
    rng = np.random.default_rng(seed)
    hidden = Hidden(*(jnp.asarray(rng.normal(size=(B, R, WIDTHS[name])), jnp.float32) for name in Hidden._fields))
    heads = [jnp.asarray(rng.normal(size=(rows, WIDTHS[name])), jnp.float32) for name in ("q_x", "f")]
    return hidden, heads[0], heads[1]


def dense(hidden, head, teacher_head, terms=NCA, stride=1):
    """Loss from [B, R, V] probabilities, in products and logarithms of them only."""
    stop = jax.lax.stop_gradient

    def probabilities(h, w):
        e = jnp.exp(jnp.einsum("brd,vd->brv", h, w[: terms.vocab_size]) / terms.temperature)
        return e / e.sum(axis=-1, keepdims=True)

    q, c, f = (
        probabilities(h, w) for h, w in zip(hidden, (head, head, stop(teacher_head)), strict=True) if h is not None
    )
    f = stop(f)
    nll = -jnp.log(jnp.take_along_axis(q, TOKENS[..., None], axis=-1)[..., 0])
    if terms.support.kind != "full":
        best = stop({"student_top_k": q, "teacher_top_k": f}[terms.support.kind])
        ids = jnp.argsort(-best, axis=-1)[..., : terms.support.k]
        inside = jax.nn.one_hot(ids, best.shape[-1]).sum(axis=-2)

        def choose(p):
            kept, rest = jnp.take_along_axis(p, ids, axis=-1), (p * (1 - inside)).sum(axis=-1, keepdims=True)
            choices = {"none": [kept], "renormalize": [kept / kept.sum(axis=-1, keepdims=True)], "bucket": [kept, rest]}
            return jnp.concatenate(choices[terms.support.tail], axis=-1)

        q, c, f = choose(q), choose(c), choose(f)

    def compare(kind: Divergence, p, other):
        def kl(a, b):
            entries = a * jnp.log(a / b)
            return (entries if kind.entry_clip is None else jnp.minimum(entries, kind.entry_clip)).sum(axis=-1)

        w = kind.jsd_weight
        m = w * p + (1 - w) * other
        return {
            "reverse_kl": kl(p, other),
            "forward_kl": kl(other, p),
            "symmetric_kl": (kl(p, other) + kl(other, p)) / 2,
            "jsd": w * kl(p, m) + (1 - w) * kl(other, m),
        }[kind.kind]

    first = nll if terms.first == "nll" else compare(terms.first, q, f)
    target = q if terms.anchor.target == "student" else f
    anchor = compare(terms.anchor.divergence, c, stop(target) if terms.anchor.stop_gradient else target)
    gate = 1.0 if terms.anchor.gate_tau is None else jnp.exp(-stop(first) / terms.anchor.gate_tau)
    rows = (jnp.arange(B) % stride == 0)[:, None] * stride
    loss = (WEIGHTS * first).sum() + BETA * (WEIGHTS * rows * gate * anchor).sum()
    return loss, (first * MASK, anchor * MASK, gate * MASK)


def one_pass(hidden, head, teacher_head, terms=NCA, weights=WEIGHTS, mesh=None):
    weights, tokens = jnp.asarray(weights, jnp.float32), jnp.asarray(TOKENS)
    return weighted_loss(hidden, head, teacher_head, tokens, weights, BETA, terms, mesh)


def values_and_gradients(function, *inputs):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))(*inputs)


def in_float64(terms=NCA, inputs=None, stride=1):
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), inputs or random_inputs())
        result = values_and_gradients(functools.partial(dense, terms=terms, stride=stride), *inputs)
        return jax.tree.map(np.asarray, result)


def assert_equal(found, expected, atol=2e-5):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=atol), jax.tree.leaves(found), jax.tree.leaves(expected)
    )


def variant(**changes) -> Terms:
    return dataclasses.replace(NCA, **changes)


def anchored(**changes) -> Terms:
    return variant(anchor=AnchorTerm(**changes))


VARIANTS = {
    "nca": NCA,
    "forward_kl": variant(first=Divergence("forward_kl")),
    "symmetric_kl": variant(first=Divergence("symmetric_kl")),
    "jsd": variant(first=Divergence("jsd")),
    "jsd 0.1": variant(first=Divergence("jsd", jsd_weight=0.1)),
    "nll": variant(first="nll"),
    "entry clip": variant(first=Divergence("reverse_kl", entry_clip=0.05)),
    "gated": anchored(gate_tau=0.25),
    "dual": anchored(target="teacher", divergence=Divergence("reverse_kl")),
    "reverse anchor": anchored(divergence=Divergence("reverse_kl")),
    "symmetric anchor": anchored(divergence=Divergence("symmetric_kl")),
    "no stop-gradient": anchored(divergence=Divergence("symmetric_kl"), stop_gradient=False),
    "gated, no stop-gradient": anchored(stop_gradient=False, gate_tau=0.5),
    **{
        f"{kind} {tail}": variant(support=Support(kind, 4, tail))
        for kind in ("student_top_k", "teacher_top_k")
        for tail in ("none", "renormalize", "bucket")
    },
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_equals_the_dense_computation(name):
    """Loss, per-token values, and gradients to hidden states and heads; the teacher has none."""
    found = values_and_gradients(functools.partial(one_pass, terms=VARIANTS[name]), *random_inputs())
    expected = in_float64(VARIANTS[name])
    assert_equal(found[0], expected[0])
    (hidden, head, teacher_head), (right_hidden, right_head, _) = found[1], expected[1]
    assert_equal((hidden.q_x, hidden.q_c, head), (right_hidden.q_x, right_hidden.q_c, right_head))
    assert not np.any(hidden.f) and not np.any(teacher_head)
    assert np.any(hidden.q_x) and np.any(hidden.q_c) and np.any(head)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "top_k" in name])
def test_a_top_k_of_a_split_vocabulary_equals_the_dense_computation(name):
    """Four devices have three of the twelve entries each, for two groups of rows."""
    mesh = make_mesh({"replica": 1, "data": 2, "fsdp": 2, "tensor": 2})
    found = values_and_gradients(functools.partial(one_pass, terms=VARIANTS[name], mesh=mesh), *random_inputs())
    assert_equal(found, in_float64(VARIANTS[name]))


@pytest.mark.parametrize("chunk_size", [1, 4, 8, 12, 100], ids="chunks of {}".format)
def test_the_chunk_size_changes_nothing(chunk_size):
    terms = anchored(gate_tau=0.25)
    found = values_and_gradients(
        functools.partial(one_pass, terms=dataclasses.replace(terms, chunk_size=chunk_size)), *random_inputs()
    )
    expected = values_and_gradients(functools.partial(one_pass, terms=terms), *random_inputs())
    assert_equal(found, expected, atol=1e-5)


def test_an_anchor_on_every_other_example_is_twice_as_heavy():
    """Unbiased: over a random order of the examples its expectation is that of the anchor on all of them."""
    terms = anchored(gate_tau=0.5)
    hidden, *heads = random_inputs()
    subset = hidden._replace(q_c=hidden.q_c[::2])
    (loss, values), (gradient, head, _) = values_and_gradients(functools.partial(one_pass, terms=terms), subset, *heads)
    (right_loss, right_values), (right_gradient, right_head, _) = in_float64(terms, stride=2)
    assert_equal((loss, values.anchor, gradient.q_x), (right_loss, right_values[1][::2], right_gradient.q_x))
    assert_equal((gradient.q_c, head), (right_gradient.q_c[::2], right_head))


def test_the_gradient_scales_with_what_is_made_of_the_loss():
    inputs = random_inputs()
    once = jax.grad(lambda *a: one_pass(*a)[0])(*inputs)
    scaled = jax.grad(lambda *a: -3.0 * one_pass(*a)[0] + 1.0)(*inputs)
    assert_equal(scaled, jax.tree.map(lambda g: -3.0 * g, once), atol=1e-6)


def test_the_loss_without_gradient_is_the_same():
    np.testing.assert_allclose(one_pass(*random_inputs())[0], values_and_gradients(one_pass, *random_inputs())[0][0])


@pytest.mark.parametrize(
    ("case", "expected", "gradients"),
    [
        ("opd", 0.9853647902, ([0.687866, -0.457597, -0.168340, -0.061929], [0] * 4)),
        ("anchor", 0.2988049397, ([0] * 4, [-0.346992, 0.060040, 0.209778, 0.077173])),
    ],
)
def test_known_values_and_where_their_gradients_go(case, expected, gradients):
    """Through identity heads the hidden states are the logits."""
    logits = Hidden(*(jnp.array([[x]]) for x in ([2.0, 1, 0, -1], [1.0, 1, 1, 0], [0.0, 2, 1, 0])))
    terms, weight = Terms(vocab_size=4, anchor=AnchorTerm()), jnp.ones((1, 1))

    def loss(hidden):
        both = weighted_loss(hidden, jnp.eye(4), jnp.eye(4), jnp.zeros((1, 1), int), weight, 1.0, terms)[0]
        # The anchor alone is the difference; q_c enters the first term nowhere and q_x the second by its value only.
        without = hidden._replace(q_c=None)
        first = weighted_loss(
            without,
            jnp.eye(4),
            jnp.eye(4),
            jnp.zeros((1, 1), int),
            weight,
            1.0,
            dataclasses.replace(terms, anchor=None),
        )[0]
        return first if case == "opd" else both - first

    value, found = jax.value_and_grad(loss)(logits)
    np.testing.assert_allclose(value, expected, atol=1e-6)
    np.testing.assert_allclose(found.q_x[0, 0], gradients[0], atol=1e-6)
    np.testing.assert_allclose(found.q_c[0, 0], gradients[1], atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_padded_vocabularies_of_different_sizes_change_nothing(name):
    """Rows beyond the tokenizer's size, however probable, get no probability and no gradient."""
    hidden, head, teacher_head = random_inputs()
    run = functools.partial(one_pass, terms=VARIANTS[name])
    padded = [jnp.concatenate([w, 50.0 * jnp.ones((n, w.shape[1]))]) for w, n in ((head, 5), (teacher_head, 9))]
    values, gradients = values_and_gradients(run, hidden, head, teacher_head)
    padded_values, padded_gradients = values_and_gradients(run, hidden, *padded)
    assert_equal(padded_values, values, atol=1e-5)
    assert_equal(padded_gradients[0], gradients[0], atol=1e-5)
    np.testing.assert_allclose(padded_gradients[1], np.pad(gradients[1], ((0, 5), (0, 0))), atol=1e-5)
    assert not np.any(padded_gradients[1][V:])


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_minus_infinity_give_finite_values_and_gradients(name):
    """A token whose logit overflows in every distribution, as that of one that was masked out."""
    hidden, head, teacher_head = random_inputs()
    hidden = jax.tree.map(lambda h: h.at[..., 0].set(2.0), hidden)
    head, teacher_head = (w.at[3].set(0.0).at[3, 0].set(-3e38) for w in (head, teacher_head))
    assert np.all(np.einsum("brd,vd->brv", hidden.q_x, head)[..., 3] == -np.inf)
    terms = VARIANTS[name]
    # nll of a token that cannot be is not a number one could be finite about.
    tokens = jnp.where(TOKENS == 3, 4, TOKENS)
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    run = lambda h: weighted_loss(h, head, teacher_head, tokens, weights, BETA, terms)[0]  # noqa: E731
    loss, gradient = jax.jit(jax.value_and_grad(run))(hidden)
    finite_head = jax.tree.map(lambda w: w.at[3, 0].set(-1e4), (head, teacher_head))
    expected = weighted_loss(hidden, *finite_head, tokens, weights, BETA, terms)[0]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert all(np.isfinite(g).all() for g in gradient)


def test_a_top_k_beyond_the_vocabulary_is_all_of_it():
    all_of_it = one_pass(*random_inputs(), terms=variant(support=Support("student_top_k", 1000, "renormalize")))
    assert_equal(all_of_it, one_pass(*random_inputs()), atol=1e-5)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_junk_in_masked_positions_reaches_no_value_and_no_gradient(junk):
    hidden, *heads = random_inputs()
    dirty = Hidden(*(jnp.where(MASK[..., None], h, junk) for h in hidden))
    clean_result = values_and_gradients(one_pass, hidden, *heads)
    dirty_result = values_and_gradients(one_pass, dirty, *heads)
    jax.tree.map(np.testing.assert_array_equal, dirty_result, clean_result)
    for values in clean_result[0][1][:2]:
        assert np.all(values[~MASK] == 0) and np.all(values[MASK] > 0)
    for h in clean_result[1][0][:2]:
        np.testing.assert_array_equal(h[~MASK], 0)


def test_bfloat16_hidden_states_give_float32_values_and_gradients_of_their_own_dtype():
    hidden, *heads = random_inputs()
    half = Hidden(*(h.astype(jnp.bfloat16) for h in hidden))
    (loss, values), (gradient, head, _) = values_and_gradients(one_pass, half, *heads)
    assert loss.dtype == head.dtype == jnp.float32 and {v.dtype for v in values} == {jnp.dtype(jnp.float32)}
    assert gradient.q_x.dtype == gradient.q_c.dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (hidden, *heads))
    expected = values_and_gradients(one_pass, *rounded)
    np.testing.assert_allclose(loss, expected[0][0], rtol=1e-4)
    np.testing.assert_allclose(head, expected[1][1], atol=0.02 * np.abs(expected[1][1]).max())
    # A CPU may keep more digits than it was asked for, so the program itself must not ask for bfloat16 logits.
    program = str(jax.make_jaxpr(lambda h: one_pass(h, *heads))(half))
    assert f"f32[8,{V}]" in program and f"bf16[8,{V}]" not in program


def test_gradients_of_many_chunks_add_up_in_float32():
    """2048 positions in bfloat16, a head in bfloat16: added up in bfloat16 the sum would stop growing."""
    positions, width = 2048, 8
    hidden = Hidden(*(jnp.ones((1, positions, width), jnp.bfloat16) * x for x in (0.5, 0.25, 0.1)))
    head = jnp.asarray(np.random.default_rng(0).normal(size=(V, width)), jnp.bfloat16)
    weight, token = jnp.ones((1, positions)), jnp.zeros((1, positions), int)

    def run(w, n):
        few = Hidden(*(h[:, :n] for h in hidden))
        return weighted_loss(few, w, head, token[:, :n], weight[:, :n], BETA, variant(chunk_size=1))[0]

    whole, one = (np.asarray(jax.jit(jax.grad(functools.partial(run, n=n)))(head), np.float64) for n in (positions, 1))
    np.testing.assert_allclose(whole / positions, one, atol=0.01 * np.abs(one).max())


def test_a_chunk_is_of_each_data_group():
    """Four groups work on four times as many positions at once: chunks do not get smaller as groups are added."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    hidden, head = Hidden(*[shape((8, 64, 4))] * 3), shape((16, 4))
    arrays = hidden, head, head, shape((8, 64), dtype=jnp.int32), shape((8, 64)), shape(())
    for sizes, positions in (((1, 1, 8, 1), 4), ((1, 4, 2, 1), 16), ((2, 2, 1, 2), 16), ((8, 1, 1, 1), 32)):
        mesh = make_mesh(dict(zip(("replica", "data", "fsdp", "tensor"), sizes, strict=True)))
        terms = Terms(vocab_size=16, anchor=AnchorTerm(), chunk_size=32)
        program = str(jax.make_jaxpr(functools.partial(weighted_loss, terms=terms, mesh=mesh))(*arrays))
        assert f"length={64 // positions}\n" in program, sizes


def test_no_array_of_all_tokens_by_vocabulary():
    """Memory of the compiled gradient: a few arrays of a chunk's logits and one of the head's size."""
    examples, tokens, vocabulary, width, chunk_size = 8, 512, 8192, 4, 64
    terms = Terms(vocab_size=vocabulary, anchor=AnchorTerm(), chunk_size=chunk_size)

    def loss(hidden, head, teacher_head, token, weight):
        return weighted_loss(hidden, head, teacher_head, token, weight, BETA, terms)[0]

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    hidden, head = Hidden(*[shape((examples, tokens, width))] * 3), shape((vocabulary, width))
    token = shape((examples, tokens), dtype=jnp.int32)
    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, head, token, shape((examples, tokens))).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * chunk_size * vocabulary * 4
    assert compiled.memory_analysis().temp_size_in_bytes < examples * tokens * vocabulary * 4 / 4
