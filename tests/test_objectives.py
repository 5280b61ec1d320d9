"""Divergences and reductions on four logits whose right values are known, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_jax import objectives
from nca_jax.objectives import Divergence, jensen_shannon, kl, log_probabilities, restrict
from nca_jax.split_vocabulary import top_k_ids

STUDENT, TEACHER, CONTEXT = [2.0, 1.0, 0.0, -1.0], [0.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]
Q = [0.64391426, 0.23688282, 0.08714432, 0.03205860]  # softmax(STUDENT)
KL_GRADIENT = [0.687866, -0.457597, -0.168340, -0.061929]  # of KL(student || teacher), to the student's logits


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def value_and_gradient(loss, logits):
    """Of loss(log-probabilities), to the logits."""
    of_logits = jax.jit(jax.value_and_grad(lambda x: loss(log_probabilities(x))))
    value, gradient = of_logits(jnp.asarray(logits, jnp.float64))
    assert value.dtype == gradient.dtype == jnp.float64
    return value, gradient


def log_p(logits):
    return log_probabilities(jnp.asarray(logits, jnp.float64))


def test_log_probabilities_are_those_of_the_softmax():
    np.testing.assert_allclose(jnp.exp(log_p(STUDENT)), Q, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("reverse_kl", 0.9853647902),
        ("forward_kl", 0.6985943712),
        ("jsd", 0.1871708968),
        ("symmetric_kl", (0.9853647902 + 0.6985943712) / 2),
    ],
)
def test_divergences_have_the_known_values(kind, value):
    np.testing.assert_allclose(Divergence(kind)(log_p(STUDENT), log_p(TEACHER)), value, atol=1e-10)


def test_directions_differ_by_gradient():
    q, p = np.exp(log_p(STUDENT)), np.exp(log_p(TEACHER))
    log_ratio = np.log(q / ((q + p) / 2)) / 2  # derivative of the JSD to q
    closed = {"reverse_kl": KL_GRADIENT, "forward_kl": q - p, "jsd": q * (log_ratio - q @ log_ratio)}
    closed["symmetric_kl"] = (KL_GRADIENT + (q - p)) / 2
    for kind, expected in closed.items():
        _, gradient = value_and_gradient(lambda lp, kind=kind: Divergence(kind)(lp, log_p(TEACHER)), STUDENT)
        np.testing.assert_allclose(gradient, expected, atol=1e-6, err_msg=kind)


def test_kl_is_zero_with_zero_gradient_between_equals():
    for kind in ("reverse_kl", "forward_kl", "jsd", "symmetric_kl"):
        value, gradient = value_and_gradient(lambda lp, kind=kind: Divergence(kind)(lp, log_p(STUDENT)), STUDENT)
        np.testing.assert_allclose([value, *gradient], 0, atol=1e-15, err_msg=kind)


def test_an_entry_is_clipped_from_above_and_then_has_no_gradient():
    """Of the entries of KL(s || t) the clip is below the largest only."""
    q, p = np.exp(log_p(STUDENT)), np.exp(log_p(TEACHER))
    entries = q * np.log(q / p)
    clip = (np.sort(entries)[-2] + np.sort(entries)[-1]) / 2  # between the two largest
    value, to_log_p = jax.value_and_grad(lambda lp: kl(lp, log_p(TEACHER), clip))(log_p(STUDENT))
    np.testing.assert_allclose(value, np.minimum(entries, clip).sum(), atol=1e-12)
    largest = entries.argmax()
    assert to_log_p[largest] == 0 and np.all(np.delete(np.asarray(to_log_p), largest) != 0)
    np.testing.assert_allclose(kl(log_p(STUDENT), log_p(TEACHER), 100.0), 0.9853647902, atol=1e-10)
    for kind in ("forward_kl", "jsd", "symmetric_kl"):
        assert Divergence(kind, entry_clip=0.01)(log_p(STUDENT), log_p(TEACHER)) < Divergence(kind)(
            log_p(STUDENT), log_p(TEACHER)
        )


def test_the_mixture_of_a_jsd_is_weighted():
    """FAULTS: q = (.6, .4), p = (.9, .1); the interior tends to 0 at the end."""
    q, p = jnp.log(jnp.array([0.6, 0.4])), jnp.log(jnp.array([0.9, 0.1]))
    for weight, value in ((0.9, 0.026511), (0.99, 0.003063), (0.999, 0.000311)):
        np.testing.assert_allclose(Divergence("jsd", jsd_weight=weight)(p, q), value, atol=1e-6)
        np.testing.assert_allclose(Divergence("jsd", jsd_weight=1 - weight)(q, p), value, atol=1e-6)


def test_the_anchor_moves_only_its_second_argument():
    anchor = lambda lp_s, lp_c: kl(jax.lax.stop_gradient(lp_s), lp_c)  # noqa: E731
    value, to_student = value_and_gradient(lambda lp: anchor(lp, log_p(CONTEXT)), STUDENT)
    _, to_context = value_and_gradient(lambda lp: anchor(log_p(STUDENT), lp), CONTEXT)
    np.testing.assert_allclose(value, 0.2988049397, atol=1e-10)
    np.testing.assert_allclose(kl(log_p(CONTEXT), log_p(STUDENT)), 0.3351381708, atol=1e-10)
    np.testing.assert_array_equal(to_student, 0)
    np.testing.assert_allclose(to_context, [-0.346992, 0.060040, 0.209778, 0.077173], atol=1e-6)
    np.testing.assert_allclose(to_context, np.exp(log_p(CONTEXT)) - Q, atol=1e-8)


def test_jensen_shannon_vanishes_at_both_ends_where_the_kls_do_not():
    log_q, log_p = jnp.log(jnp.array([0.6, 0.4])), jnp.log(jnp.array([0.9, 0.1]))
    for weight, value in [(0.9, 0.026511), (0.99, 0.003063), (0.999, 0.000311)]:
        np.testing.assert_allclose(jensen_shannon(log_p, log_q, weight), value, atol=1e-6)
        np.testing.assert_allclose(jensen_shannon(log_q, log_p, 1 - weight), value, atol=1e-6)
    np.testing.assert_allclose(Divergence("reverse_kl")(log_p, log_q), 0.226289, atol=1e-6)
    np.testing.assert_allclose(Divergence("forward_kl")(log_p, log_q), 0.311239, atol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 1.0, -0.1, 1.1, float("nan")])
def test_the_ends_of_jensen_shannon_are_refused(weight):
    with pytest.raises(ValueError, match="inside"):
        jensen_shannon(log_p(STUDENT), log_p(TEACHER), weight)


@pytest.mark.parametrize("tail", ["full", "renormalize", "bucket"])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_logit_of_minus_infinity_counts_for_nothing(kind, tail):
    def loss(teacher, ids):
        choose = lambda lp: lp if tail == "full" else restrict(lp, jnp.array(ids), tail)  # noqa: E731
        return lambda lp: Divergence(kind)(choose(lp), choose(log_p(teacher)))

    value, gradient = value_and_gradient(loss(TEACHER, [0, 1]), STUDENT)
    with_inf, gradient_with_inf = value_and_gradient(loss([*TEACHER, -jnp.inf], [0, 4, 1]), [*STUDENT, -jnp.inf])
    np.testing.assert_allclose(with_inf, value, atol=1e-12)
    np.testing.assert_allclose(gradient_with_inf, [*gradient, 0], atol=1e-12)


@pytest.mark.parametrize("beyond", [[], [-jnp.inf] * 3], ids=["nothing", "impossible ids"])
def test_a_bucket_with_no_probability_in_it_leaves_the_divergence(beyond):
    def choose(log_p):
        return restrict(log_p, jnp.arange(4), "bucket")

    value, gradient = value_and_gradient(lambda lp: kl(choose(lp), choose(log_p(TEACHER + beyond))), STUDENT + beyond)
    np.testing.assert_allclose(value, 0.9853647902, atol=1e-10)
    np.testing.assert_allclose(gradient, KL_GRADIENT + [0] * len(beyond), atol=1e-6)


def test_bfloat16_logits_are_upcast_before_the_softmax():
    """All in bfloat16, about half of these divergences come out negative."""
    rng = np.random.default_rng(0)
    student = jnp.asarray(rng.normal(0, 3, (64, 32000)), jnp.bfloat16)
    teacher = student.astype(jnp.float32) + rng.normal(0, 0.02, student.shape).astype(np.float32)
    log_q = log_probabilities(student)
    values = kl(log_q, log_probabilities(teacher))
    assert log_q.dtype == values.dtype == jnp.float32
    np.testing.assert_allclose(values.mean(), 1.90e-4, rtol=0.01)
    assert values.min() > 0


@pytest.mark.parametrize(("tail", "value"), [("none", 1.098176), ("renormalize", 1.006842), ("bucket", 0.985365)])
def test_top_k_on_the_students_ids(tail, value):
    ids = top_k_ids(log_p(STUDENT), 2)
    np.testing.assert_array_equal(ids, [0, 1])

    def loss(lp):
        return kl(restrict(lp, ids, tail), restrict(log_p(TEACHER), ids, tail))

    q, p = np.exp(log_p(STUDENT)), np.exp(log_p(TEACHER))
    if tail == "renormalize":
        q, p = (np.where(np.arange(4) < 2, x, 0) / x[:2].sum() for x in (q, p))
    # Derivative of the sum to each q_i, then through the softmax.
    slope = np.log(q, where=q > 0, out=np.zeros(4)) - np.log(p, where=p > 0, out=np.zeros(4)) + 1
    if tail == "bucket":
        slope[2:] = np.log(q[2:].sum() / p[2:].sum()) + 1
    else:
        slope[2:] = 0
    found, gradient = value_and_gradient(loss, STUDENT)
    np.testing.assert_allclose(found, value, atol=1e-6)
    np.testing.assert_allclose(gradient, q * (slope - q @ slope), atol=1e-10)


def test_a_truncated_sum_can_be_negative_and_a_bucket_is_a_lower_bound():
    ids = jnp.array([2, 3])
    none, bucket = (
        kl(restrict(log_p(STUDENT), ids, tail), restrict(log_p(TEACHER), ids, tail)) for tail in ("none", "bucket")
    )
    assert none < 0 < bucket < 0.9853647902


def test_a_bucket_is_summed_and_not_subtracted():
    """Of what is left beside a probability of almost 1, float32 still knows its size."""
    left = restrict(log_probabilities(jnp.array([0.0, -30.0, -30.0], jnp.float32)), jnp.array([0]), "bucket")[1]
    np.testing.assert_allclose(left, np.log(2) - 30, rtol=1e-6)


def test_temperature_divides_both_sides_once():
    value = kl(log_probabilities(jnp.array(STUDENT), 2.0), log_probabilities(jnp.array(TEACHER), 2.0))
    np.testing.assert_allclose(value, 0.2463715670, atol=1e-10)


def test_what_has_no_weight_may_be_nan():
    weights = jnp.array([1.0, 0.0])
    value, gradient = jax.value_and_grad(objectives.weighted_sum)(jnp.array([1.0, jnp.nan]), weights)
    assert value == 1
    np.testing.assert_array_equal(gradient, [1, 0])


def mean(rows_BxR, mask_BxR, reduction):
    weights = objectives.reduction_weights(jnp.array(mask_BxR, bool), reduction)
    return objectives.weighted_sum(jnp.array(rows_BxR, jnp.float64), weights)


def test_all_tokens_of_the_step_weigh_alike():
    """FAULTS: [4] and [1, 1, 1] in two micro-batches are 1.75, and not the mean of means or a sum of means."""
    rows, mask = jnp.array([[4.0, 9, 9], [1, 1, 1]]), jnp.array([[1, 0, 0], [1, 1, 1]], bool)
    weights = objectives.reduction_weights(mask, "token")
    np.testing.assert_allclose(objectives.weighted_sum(rows, weights), 1.75)
    parts = [objectives.weighted_sum(rows[i], weights[i]) for i in range(2)]
    np.testing.assert_allclose(parts, [1.0, 0.75])


def test_the_sequence_mean_weighs_every_response_alike_and_no_empty_one():
    rows, mask = [[4, 9, 9], [1, 3, 9], [9, 9, 9]], [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert mean(rows, mask, "sequence") == 3


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("x", [0.0, 7.0, 1e30, np.inf, np.nan])
def test_pads_change_nothing(reduction, x):
    assert mean([[1, 2, x, x]], [[1, 1, 0, 0]], reduction) == 1.5


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_a_batch_without_tokens_has_value_and_gradient_zero(reduction):
    rows, mask = [[np.nan, 1.0]], [[0, 0]]
    assert mean(rows, mask, reduction) == 0
    gradient = jax.grad(lambda r: mean(r, mask, reduction))(jnp.array(rows))
    np.testing.assert_array_equal(gradient, 0)


def test_unknown_names_are_refused():
    for call in (
        lambda: Divergence("kl")(log_p(STUDENT), log_p(TEACHER)),
        lambda: restrict(log_p(STUDENT), jnp.array([0]), "drop"),
        lambda: objectives.reduction_weights(jnp.ones((1, 1)), "mean"),
    ):
        with pytest.raises(ValueError, match="unknown"):
            call()
