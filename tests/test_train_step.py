"""The step against golden numbers from torch, and its invariances."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import GOLDEN, SHARED
from flax import nnx
from safetensors.numpy import load_file

from nca_jax.models.architecture import load_architecture
from nca_jax.models.decoder import decoder_graph, random_params
from nca_jax.models.huggingface import load_params
from nca_jax.objectives import Divergence, Support
from nca_jax.train_step import AnchorSchedule, Objective, Teacher, TrainState, make_loss_and_gradient, make_train_step
from nca_jax.views import Batch, Retained, Sight, View, at_response, response_streams, shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Terms

STEP = np.load(GOLDEN / "step.npz")
ARCH = load_architecture(GOLDEN / "llama3")
GRAPH = decoder_graph(ARCH)
VOCAB = ARCH.vocab_size

PLAIN = Terms(vocab_size=VOCAB, chunk_size=4)


def opd(**terms) -> Objective:
    return Objective(dataclasses.replace(PLAIN, **terms))


def nca(beta=0.5, anchor=AnchorTerm(), schedule=AnchorSchedule(), reduction="token", **terms) -> Objective:  # noqa: B008
    return Objective(dataclasses.replace(PLAIN, anchor=anchor, **terms), beta, schedule, reduction=reduction)


OPD, NCA = opd(), nca()
TOP8 = Support("student_top_k", 8, "renormalize")
CASES = {
    "opd": OPD,
    "nca_const": NCA,
    "nca_gated": nca(anchor=AnchorTerm(gate_tau=0.25)),
    "opd_temp07": opd(temperature=0.7),
    "opd_top8": opd(support=TOP8),
    "opd_top8_tail": opd(support=dataclasses.replace(TOP8, tail="bucket")),
    "nca_top8": nca(support=TOP8),
    "anchor_to_teacher": opd(first=Divergence("forward_kl")),
    "jsd": opd(first=Divergence("jsd")),
}


@pytest.fixture(scope="module")
def student():
    return load_params(GOLDEN / "llama3", ARCH)


@pytest.fixture(scope="module")
def teacher_params():
    return load_params(GOLDEN / "llama3_teacher", ARCH)


def make_teacher(params, prefix_C) -> Teacher:
    return Teacher(params, shared_prefix(nnx.merge(GRAPH, params), jnp.asarray(prefix_C)))


def golden_batch(rows=slice(None), split=True) -> Batch:
    """The golden examples; `split` keeps the shared tokens as a prefix, else each example repeats them."""
    own_BxP, length_B = STEP["own_BxP"][rows], STEP["own_length_B"][rows]

    def view(shared_C):
        if split:
            return View(jnp.asarray(shared_C), jnp.asarray(own_BxP), jnp.asarray(length_B))
        prompt_BxP = np.concatenate([np.tile(shared_C, (len(own_BxP), 1)), own_BxP], axis=1)
        return View(jnp.zeros(0, jnp.int32), jnp.asarray(prompt_BxP), jnp.asarray(length_B + len(shared_C)))

    R = STEP["response_BxR"].shape[1]
    mask_BxR = np.arange(R) < STEP["response_length_B"][rows][:, None]
    response_BxR = jnp.asarray(STEP["response_BxR"][rows])
    return Batch(view(STEP["header"]), view(STEP["context"]), response_BxR, jnp.asarray(mask_BxR))


def mean_loss_and_gradient(objective, params, teacher, batch, accumulation=1, lengths=1):
    run = jax.jit(make_loss_and_gradient(GRAPH, GRAPH, objective, accumulation, lengths=lengths))
    loss, gradient, terms = run(TrainState(jnp.int32(0), params, None), teacher, batch)
    return loss, jax.tree.map(np.asarray, gradient), terms


@pytest.mark.parametrize(("case", "split"), [*((case, True) for case in CASES), ("nca_gated", False)])
def test_loss_and_gradient_equal_torch(case, split, student, teacher_params):
    """With the shared tokens kept once, and (one case) repeated in every example."""
    batch = golden_batch(split=split)
    teacher = make_teacher(teacher_params, batch.with_context.prefix_C) if split else Teacher(teacher_params, [])
    loss, gradient, _ = mean_loss_and_gradient(CASES[case], student, teacher, batch)
    np.testing.assert_allclose(loss, STEP[f"{case}_token_mean"], atol=1e-4)
    np.testing.assert_allclose(optax.tree.norm(gradient), STEP[f"grad_norm_{case}"], rtol=1e-3)
    if f"grad_embed_{case}" in STEP:
        K, Q, D = ARCH.num_kv_heads, ARCH.head_dim, ARCH.hidden_size
        key_gradient = gradient["key"][1].transpose(1, 2, 0).reshape(K * Q, D)
        np.testing.assert_allclose(gradient["embedding"], STEP[f"grad_embed_{case}"], atol=1e-4)
        np.testing.assert_allclose(key_gradient, STEP[f"grad_k_proj_{case}"], atol=1e-4)


def test_sequence_mean_equals_torch(student, teacher_params):
    teacher = make_teacher(teacher_params, STEP["context"])
    objective = Objective(PLAIN, reduction="sequence")
    loss, gradient, _ = mean_loss_and_gradient(objective, student, teacher, golden_batch())
    np.testing.assert_allclose(loss, STEP["opd_sequence_mean"], atol=1e-4)
    grad_norm = [value for name, value in STEP.items() if name.startswith("grad_norm_opd_seq")]
    np.testing.assert_allclose(optax.tree.norm(gradient), grad_norm, rtol=1e-3)


def run_step(student, teacher, batch, objective=NCA, accumulation=1, clip=1.0, step=0, learning_rate=1e-3):
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip), optax.adamw(learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
    )
    train_step = jax.jit(make_train_step(GRAPH, GRAPH, optimizer, objective, accumulation))
    return train_step(TrainState(jnp.int32(step), student, optimizer.init(student)), teacher, batch)


def test_the_update_equals_torch_adamw(student, teacher_params):
    state, metrics = run_step(student, make_teacher(teacher_params, STEP["context"]), golden_batch())
    np.testing.assert_allclose(state.params["down"][0].T, STEP["adamw_down_proj"], atol=1e-6)
    np.testing.assert_allclose(state.params["final_norm"], STEP["adamw_norm"], atol=1e-6)
    assert state.step == 1 and metrics["finite"] == 1 and metrics["tokens"] == 9


def test_clipping_acts_on_the_global_norm(student, teacher_params):
    """With plain SGD behind it, the update's norm is the clip."""
    teacher = make_teacher(teacher_params, STEP["context"])
    optimizer = optax.chain(optax.clip_by_global_norm(0.125), optax.sgd(1.0))
    step = jax.jit(make_train_step(GRAPH, GRAPH, optimizer, NCA))
    state, metrics = step(TrainState(jnp.int32(0), student, optimizer.init(student)), teacher, golden_batch())
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, state.params, student))
    np.testing.assert_allclose(moved, 0.125, rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], STEP["grad_norm_nca_const"], rtol=1e-3)


def test_with_the_initial_student_as_teacher_both_terms_are_equal(student):
    teacher = make_teacher(student, STEP["context"])
    _, metrics = run_step(student, teacher, golden_batch())
    assert metrics["opd"] > 0.1
    np.testing.assert_allclose(metrics["nca"], metrics["opd"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 1.5 * metrics["opd"], rtol=1e-6)


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(reduction, student, teacher_params):
    """Responses of 5, 1, 3 and 5 tokens: a mean of the micro-batches' means would differ."""
    teacher = make_teacher(teacher_params, STEP["context"])
    batch = golden_batch(np.array([0, 1, 2, 0]))
    objective = nca(reduction=reduction)
    whole, metrics = run_step(student, teacher, batch, objective)
    for parts in (2, 4):
        state, parts_metrics = run_step(student, teacher, batch, objective, accumulation=parts)
        for name in metrics:
            np.testing.assert_allclose(parts_metrics[name], metrics[name], rtol=1e-5, err_msg=name)
        # The first moment is the clipped gradient times 0.1, to 1e-6 of its norm of 1.
        for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(whole.opt_state), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_micro_batches_without_a_token_are_not_computed(student, teacher_params):
    """Their prompts are of a token whose embedding is not a number, so that any computation with them would show."""
    objective, poison = nca(vocab_size=VOCAB - 1), VOCAB - 1
    params, frozen = (p | {"embedding": p["embedding"].at[poison].set(jnp.nan)} for p in (student, teacher_params))
    batch = golden_batch(slice(0, 2))
    teacher = make_teacher(frozen, batch.with_context.prefix_C)

    def longer(view: View) -> View:
        prompt_BxP = jnp.concatenate([view.prompt_BxP, jnp.full_like(view.prompt_BxP, poison)])
        return View(view.prefix_C, prompt_BxP, jnp.tile(view.prompt_length_B, 2))

    response_BxR, mask_BxR = batch.response_BxR, batch.response_mask_BxR
    padded = Batch(
        longer(batch.no_context),
        longer(batch.with_context),
        jnp.concatenate([response_BxR, jnp.full_like(response_BxR, poison)]),
        jnp.concatenate([mask_BxR, jnp.zeros_like(mask_BxR)]),
    )
    loss, gradient, _ = mean_loss_and_gradient(objective, params, teacher, batch)
    skipped_loss, skipped, _ = mean_loss_and_gradient(objective, params, teacher, padded, accumulation=2)
    np.testing.assert_allclose(skipped_loss, loss, rtol=1e-6)
    for name in gradient:
        np.testing.assert_allclose(skipped[name], gradient[name], rtol=1e-5, atol=1e-7, err_msg=name)
    _, computed, _ = mean_loss_and_gradient(objective, params, teacher, padded, accumulation=1)
    assert np.isnan(computed["query"]).any(), "in one piece they are computed"


def test_a_row_is_prompt_response_padding():
    view = View(np.array([9]), np.array([[1, 2, 0], [3, 0, 0]]), np.array([2, 1]))
    sight = Sight(view, [], np.array([[5, 6], [7, 8]]))
    (stream,) = response_streams([sight])
    # What follows a response that has ended is in nobody's sight; here the second one has not.
    np.testing.assert_array_equal(stream.token_BxT[0, :4], [1, 2, 5, 6])
    np.testing.assert_array_equal(stream.token_BxT[1, :3], [3, 7, 8])
    np.testing.assert_array_equal(stream.position_BxT, [[1, 2, 3, 4, 5]])
    at_BxRx1 = at_response(np.arange(5)[None, :, None].repeat(2, axis=0), sight)
    np.testing.assert_array_equal(at_BxRx1[..., 0], [[1, 2], [0, 1]])


def test_an_example_counts_the_same_alone_and_among_longer_ones(student, teacher_params):
    teacher = make_teacher(teacher_params, STEP["context"])
    _, _, together = mean_loss_and_gradient(NCA, student, teacher, golden_batch())
    alone = [mean_loss_and_gradient(NCA, student, teacher, golden_batch(slice(i, i + 1)))[2] for i in range(3)]
    tokens = STEP["response_length_B"]
    for name in ("opd", "nca"):
        sums = sum(terms[name] * n for terms, n in zip(alone, tokens, strict=True))
        np.testing.assert_allclose(sums / tokens.sum(), together[name], rtol=1e-5)
    np.testing.assert_allclose(alone[1]["opd"], STEP["opd"][1, 0], atol=1e-4)  # a response of one token


def test_what_stands_in_the_padding_changes_nothing(student, teacher_params):
    teacher, batch = make_teacher(teacher_params, STEP["context"]), golden_batch()
    _, gradient, sums = mean_loss_and_gradient(NCA, student, teacher, batch)

    def noisy(view):
        pad_BxP = jnp.arange(view.prompt_BxP.shape[1]) >= view.prompt_length_B[:, None]
        wider = jnp.where(pad_BxP, 77, view.prompt_BxP)
        return view.replace(prompt_BxP=jnp.pad(wider, ((0, 0), (0, 3)), constant_values=99))

    response_BxR = jnp.where(batch.response_mask_BxR, batch.response_BxR, 55)
    other = Batch(noisy(batch.no_context), noisy(batch.with_context), response_BxR, batch.response_mask_BxR)
    _, other_gradient, other_sums = mean_loss_and_gradient(NCA, student, teacher, other)
    np.testing.assert_allclose(other_sums["opd"], sums["opd"], rtol=1e-5)
    np.testing.assert_allclose(other_sums["nca"], sums["nca"], rtol=1e-5)
    np.testing.assert_allclose(other_gradient["embedding"], gradient["embedding"], atol=1e-5)


def test_a_batch_without_response_tokens_has_loss_and_gradient_zero(student, teacher_params):
    teacher, batch = make_teacher(teacher_params, STEP["context"]), golden_batch()
    empty = batch.replace(response_mask_BxR=jnp.zeros_like(batch.response_mask_BxR))
    for reduction in ("token", "sequence"):
        _, metrics = run_step(student, teacher, empty, nca(reduction=reduction))
        assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["tokens"] == 0 and metrics["finite"] == 1


def test_an_empty_response_has_no_weight_in_the_sequence_mean(student, teacher_params):
    teacher, batch = make_teacher(teacher_params, STEP["context"]), golden_batch()
    one_empty = batch.replace(response_mask_BxR=batch.response_mask_BxR.at[0].set(False))
    objective = Objective(PLAIN, reduction="sequence")
    loss, _, _ = mean_loss_and_gradient(objective, student, teacher, one_empty)
    expected = np.mean([STEP["opd"][1, 0], STEP["opd"][2, :3].mean()])
    np.testing.assert_allclose(loss, expected, atol=1e-4)


def test_a_non_finite_weight_is_reported(student, teacher_params):
    broken = student | {"final_norm": student["final_norm"].at[0].set(jnp.nan)}
    _, metrics = run_step(broken, make_teacher(teacher_params, STEP["context"]), golden_batch())
    assert metrics["finite"] == 0


@pytest.mark.parametrize(("step", "weight"), [(0, 0.0), (4, 0.0), (6, 0.25), (8, 0.5), (12, 1.0), (50, 1.0)])
def test_warm_up_of_the_anchor(step, weight, student, teacher_params):
    teacher = make_teacher(teacher_params, STEP["context"])
    schedule = AnchorSchedule(start_step=4, warmup_steps=8)
    _, metrics = run_step(student, teacher, golden_batch(), nca(schedule=schedule), step=step)
    np.testing.assert_allclose(
        metrics["loss"], STEP["opd_token_mean"] + 0.5 * weight * STEP["anchor_token_mean"], atol=1e-4
    )


def test_the_anchor_moves_only_the_with_context_view(student, teacher_params):
    """Its gradient, NCA minus OPD, equals that of the anchor alone, whose q_x carries none (torch's number)."""
    teacher, batch = make_teacher(teacher_params, STEP["context"]), golden_batch()
    _, both, _ = mean_loss_and_gradient(nca(beta=1.0), student, teacher, batch)
    _, first, _ = mean_loss_and_gradient(OPD, student, teacher, batch)
    difference = jax.tree.map(np.subtract, both, first)
    np.testing.assert_allclose(optax.tree.norm(difference), STEP["grad_norm_anchor"], rtol=1e-3)


def test_bfloat16_masters_accumulate_in_float32_and_float32_masters_keep_small_steps(student, teacher_params):
    teacher = make_teacher(teacher_params, STEP["context"])
    state, _ = run_step(student, teacher, golden_batch(), learning_rate=1e-6)
    moved = np.abs(np.asarray(state.params["final_norm"]) - np.asarray(student["final_norm"]))
    assert 5e-7 < moved.max() < 2e-6  # bfloat16 would have rounded it away: its step at 1 is 8e-3
    half = random_params(ARCH, 0, jnp.bfloat16)
    _, metrics = run_step(half, teacher, golden_batch(np.array([0, 1])), accumulation=2)
    assert metrics["finite"] == 1


@pytest.mark.skipif(not (SHARED / "golden/torch_step").exists(), reason="independent golden step is not here")
def test_the_step_equals_an_independent_implementation():
    directory = SHARED / "golden/torch_step"
    fixture, arch = np.load(directory / "fixture.npz"), load_architecture(directory)
    params, graph = load_params(directory, arch), decoder_graph(arch)

    def view(prompts):
        length_B = np.array([len(prompt) for prompt in prompts], np.int32)
        prompt_BxP = np.stack([np.pad(prompt, (0, max(length_B) - len(prompt))) for prompt in prompts])
        return View(jnp.zeros(0, jnp.int32), jnp.asarray(prompt_BxP, jnp.int32), jnp.asarray(length_B))

    def unpadded(ids_BxT, mask_BxT):
        return [row[mask > 0] for row, mask in zip(ids_BxT, mask_BxT, strict=True)]

    mask_BxR = fixture["completion_mask"].astype(bool)
    R = mask_BxR.shape[1]
    no_context = unpadded(fixture["prompt_ids"], fixture["prompt_mask"])
    # Each of the teacher's rows is a prompt padded on the left and the response padded on the right.
    with_context = unpadded(fixture["teacher_input_ids"][:, :-R], fixture["teacher_attention_mask"][:, :-R])
    response_BxR = jnp.asarray(fixture["completion_ids"], jnp.int32)
    batch = Batch(view(no_context), view(with_context), response_BxR, jnp.asarray(mask_BxR))

    # The reference's embedding layer drops the gradient of its padding token, which here is also the end token and part
    # of the prompts. To leave out the same, the head is given as an array of its own and that row is set to 0.
    untied = decoder_graph(dataclasses.replace(arch, tied_head=False))
    student, teacher = params | {"head": params["embedding"]}, Teacher(params, [])

    def measure(objective):
        run = jax.jit(make_loss_and_gradient(untied, graph, objective))
        loss, gradient, _ = run(TrainState(jnp.int32(0), student, None), teacher, batch)
        embedding = gradient["embedding"].at[2].set(0.0) + gradient.pop("head")
        return loss, optax.tree.norm(gradient | {"embedding": embedding})

    terms = Terms(vocab_size=arch.vocab_size)
    plain = lambda **changes: Objective(dataclasses.replace(terms, **changes))  # noqa: E731
    for objective, loss_key, norm_key in [
        (plain(), "rev_tokmean", "gn_rev"),
        (Objective(terms, reduction="sequence"), "rev_seqmean", "gn_rev_seqmean"),
        (plain(first=Divergence("forward_kl")), "fwd_tokmean", None),
        (plain(first=Divergence("jsd")), "jsd_tokmean", None),
        (plain(support=Support("student_top_k", 100, "renormalize")), "top100_renorm", None),
        (plain(support=Support("student_top_k", 100, "bucket")), "top100_tail", None),
        (Objective(dataclasses.replace(terms, anchor=AnchorTerm()), beta=1.0), None, "gn_nca_b1"),
    ]:
        loss, norm = measure(objective)
        if loss_key:
            np.testing.assert_allclose(loss, fixture[loss_key], atol=1e-4, err_msg=str(objective))
        if norm_key:
            np.testing.assert_allclose(norm, fixture[norm_key], rtol=1e-3, err_msg=str(objective))


OTHER_CONTEXT = np.random.default_rng(3).integers(3, VOCAB, 7)


def retained_batch(rows=slice(None), split=True) -> Batch:
    """The golden examples, and the same prompts under another context with responses of their own."""
    batch = golden_batch(rows, split)
    own_BxP, length_B = STEP["own_BxP"][rows], STEP["own_length_B"][rows]
    B, R = batch.response_BxR.shape
    view = View(jnp.asarray(OTHER_CONTEXT, jnp.int32), jnp.asarray(own_BxP), jnp.asarray(length_B))
    if not split:
        prompt_BxP = np.concatenate([np.tile(OTHER_CONTEXT, (B, 1)), own_BxP], axis=1)
        view = View(jnp.zeros(0, jnp.int32), jnp.asarray(prompt_BxP), jnp.asarray(length_B + len(OTHER_CONTEXT)))
    response_BxR = jnp.asarray(np.random.default_rng(4).integers(3, VOCAB, (B, R)))
    mask_BxR = jnp.arange(R) < jnp.array([2, R, 4, 1])[:B, None]
    return batch.replace(retained=Retained(view, response_BxR, mask_BxR))


def retaining(objective=NCA, gamma=0.5) -> Objective:
    return dataclasses.replace(objective, gamma=gamma)


def test_retention_is_a_forward_kl_on_the_other_context(student, teacher_params):
    """Equal to a step whose only view is the other context's, with its own mean over its own tokens."""
    batch = retained_batch()
    kept = batch.retained
    prefix = shared_prefix(nnx.merge(GRAPH, teacher_params), kept.view.prefix_C)
    teacher = make_teacher(teacher_params, STEP["context"]).replace(retained_prefix=prefix)
    loss, gradient, terms = mean_loss_and_gradient(retaining(), student, teacher, batch)
    nca_loss, nca_gradient, _ = mean_loss_and_gradient(NCA, student, teacher, batch)
    alone = Batch(kept.view, kept.view, kept.response_BxR, kept.response_mask_BxR)
    kl_loss, kl_gradient, _ = mean_loss_and_gradient(
        opd(first=Divergence("forward_kl")), student, Teacher(teacher_params, prefix), alone
    )
    np.testing.assert_allclose(terms["retention"], kl_loss, rtol=1e-5)
    np.testing.assert_allclose(loss, nca_loss + 0.5 * kl_loss, rtol=1e-5)
    for name in gradient:
        expected = nca_gradient[name] + 0.5 * kl_gradient[name]
        np.testing.assert_allclose(gradient[name], expected, atol=1e-5 * np.abs(expected).max() + 1e-7, err_msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_prefixes_encoded_once_give_the_gradient_of_the_naive_repeat(accumulation, student, teacher_params):
    """All three prefixes at once, also where the step is cut into micro-batches: the prefix is outside of the loop."""
    rows = np.array([0, 1, 2, 1])
    split, repeated = retained_batch(rows), retained_batch(rows, split=False)
    model = nnx.merge(GRAPH, teacher_params)
    prefixes = [shared_prefix(model, v.prefix_C) for v in (split.with_context, split.retained.view)]
    found = mean_loss_and_gradient(retaining(), student, Teacher(teacher_params, *prefixes), split, accumulation)
    expected = mean_loss_and_gradient(retaining(), student, Teacher(teacher_params, [], []), repeated)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, right in expected[1].items():
        np.testing.assert_allclose(found[1][name], right, atol=1e-5 * np.abs(right).max(), err_msg=name)


def test_without_micro_batches_prefixes_and_rows_are_one_run_through_the_layers(student, teacher_params):
    """Seen in the program: how many loops over layers it has."""
    teacher = make_teacher(teacher_params, STEP["context"])
    state, batch = TrainState(jnp.int32(0), student, None), golden_batch()

    def loops(accumulation):
        run = make_loss_and_gradient(GRAPH, GRAPH, NCA, accumulation)
        program = jax.make_jaxpr(lambda *arguments: run(*arguments)[0])(state, teacher, batch)
        return str(program).count(f"length={ARCH.num_layers}")

    assert loops(1) == 3  # two forward passes and the student's backward pass
    assert loops(3) >= 5  # and those of the prefixes


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_short_rows_in_a_short_program_give_the_same(accumulation, student, teacher_params):
    """All terms, with padding enough that three lengths differ, and rows in an order of their own."""
    rows = np.array([1, 0, 2, 1])
    batch, R = retained_batch(rows), 30

    def longer(responses):
        more = ((0, 0), (0, R - responses.response_BxR.shape[1]))
        return responses.replace(
            response_BxR=jnp.pad(responses.response_BxR, more, constant_values=3),
            response_mask_BxR=jnp.pad(responses.response_mask_BxR, more),
        )

    padded = longer(batch).replace(retained=longer(batch.retained))
    model = nnx.merge(GRAPH, teacher_params)
    teacher = Teacher(
        teacher_params, *(shared_prefix(model, v.prefix_C) for v in (batch.with_context, batch.retained.view))
    )
    expected = mean_loss_and_gradient(retaining(), student, teacher, batch)
    found = mean_loss_and_gradient(retaining(), student, teacher, padded, accumulation, lengths=3)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, right in expected[1].items():
        np.testing.assert_allclose(found[1][name], right, atol=1e-5 * np.abs(right).max(), err_msg=name)
    for name in ("opd", "nca", "gate", "retention"):
        np.testing.assert_allclose(found[2][name], expected[2][name], rtol=1e-5, err_msg=name)
    longest = STEP["own_BxP"].shape[1] + R
    shortest = -(-longest // 32) * 8  # a quarter, rounded up; every row fits in
    needed = [STEP["own_length_B"][row] + STEP["response_length_B"][row] for row in rows]
    assert max(needed) <= shortest < longest / 2
    np.testing.assert_allclose(found[2]["computed"], shortest / longest, rtol=1e-6)
    assert expected[2]["computed"] == 1


def test_a_long_row_is_run_at_its_length_and_the_others_at_theirs(student, teacher_params):
    """One row of four needs it all; each is a part of its own."""
    batch = golden_batch(np.array([1, 2, 1, 0]))
    more = ((0, 0), (0, 27))
    response_BxR = jnp.pad(batch.response_BxR, more, constant_values=5)
    mask_BxR = jnp.pad(batch.response_mask_BxR, more).at[3].set(True)
    batch = batch.replace(response_BxR=response_BxR, response_mask_BxR=mask_BxR)
    teacher = make_teacher(teacher_params, STEP["context"])
    expected = mean_loss_and_gradient(NCA, student, teacher, batch)
    found = mean_loss_and_gradient(NCA, student, teacher, batch, accumulation=4, lengths=2)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, right in expected[1].items():
        np.testing.assert_allclose(found[1][name], right, atol=1e-5 * np.abs(right).max(), err_msg=name)
    longest = STEP["own_BxP"].shape[1] + response_BxR.shape[1]
    half = -(-longest // 16) * 8
    np.testing.assert_allclose(found[2]["computed"], (1 + 3 * half / longest) / 4, rtol=1e-6)


def test_the_students_prefix_is_encoded_once_for_all_micro_batches(student, teacher_params):
    """Seen in the program: activations of the context's length exist outside of the loop over micro-batches only."""
    batch = golden_batch(np.array([0, 1, 2, 1]))
    teacher = make_teacher(teacher_params, STEP["context"])
    run = make_loss_and_gradient(GRAPH, GRAPH, NCA, accumulation=4)
    program = jax.make_jaxpr(run)(TrainState(jnp.int32(0), student, None), teacher, batch)
    loops = [str(e) for e in program.jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == 4]
    activations = f"f32[1,{len(STEP['context'])},{ARCH.hidden_size}]"
    assert len(loops) == 1 and activations in str(program) and activations not in loops[0]


def test_a_live_teacher_is_the_student_as_it_is(student):
    live = dataclasses.replace(NCA, teacher="live")
    loss, gradient, _ = mean_loss_and_gradient(live, student, Teacher(), golden_batch())
    frozen = mean_loss_and_gradient(NCA, student, make_teacher(student, STEP["context"]), golden_batch())
    np.testing.assert_allclose(loss, frozen[0], rtol=1e-6)
    for name in gradient:
        np.testing.assert_allclose(gradient[name], frozen[1][name], atol=1e-6, err_msg=name)


def test_an_averaged_teacher_follows_the_student_slowly(student, teacher_params):
    objective = dataclasses.replace(NCA, teacher="ema", ema_rate=0.25)
    optimizer = optax.sgd(0.1)
    step = jax.jit(make_train_step(GRAPH, GRAPH, optimizer, objective))
    before = TrainState(jnp.int32(0), student, optimizer.init(student), teacher_params)
    after, metrics = step(before, Teacher(), golden_batch())
    np.testing.assert_allclose(metrics["loss"], STEP["nca_const_token_mean"], atol=1e-4)
    for name in student:
        expected = 0.75 * teacher_params[name] + 0.25 * after.params[name]
        np.testing.assert_allclose(after.ema[name], expected, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_anchor_on_some_rows_is_unbiased(accumulation, student, teacher_params):
    """Of the two halves of four examples, the mean of both losses and gradients is that of all."""
    teacher = make_teacher(teacher_params, STEP["context"])
    rows = np.array([0, 1, 2, 1])
    half = dataclasses.replace(NCA, anchor_stride=2)
    whole = mean_loss_and_gradient(NCA, student, teacher, golden_batch(rows))
    parts = [
        mean_loss_and_gradient(half, student, teacher, golden_batch(order), accumulation)
        for order in (rows, rows[[1, 0, 3, 2]])
    ]
    assert abs(parts[0][0] - parts[1][0]) > 1e-3
    np.testing.assert_allclose((parts[0][0] + parts[1][0]) / 2, whole[0], rtol=1e-5)
    for name, right in whole[1].items():
        found = (parts[0][1][name] + parts[1][1][name]) / 2
        np.testing.assert_allclose(found, right, atol=1e-5 * np.abs(right).max(), err_msg=name)


def test_fine_tuning_needs_no_teacher(student):
    """SFT: the mean negative log-likelihood of the response's own tokens."""
    batch = golden_batch()
    loss, _, _ = mean_loss_and_gradient(opd(first="nll"), student, Teacher(), batch)
    model = nnx.merge(GRAPH, student)
    likelihood, tokens = 0.0, 0
    for i, n in enumerate(STEP["response_length_B"]):
        prompt = [*STEP["header"], *STEP["own_BxP"][i, : STEP["own_length_B"][i]]]
        ids = jnp.array([[*prompt, *STEP["response_BxR"][i, :n]]])
        hidden, _ = model(ids, jnp.arange(ids.shape[1])[None])
        log_p = jax.nn.log_softmax(hidden[0] @ model.head_VxD.T)
        likelihood += log_p[jnp.arange(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]].sum()
        tokens += n
    np.testing.assert_allclose(loss, -likelihood / tokens, rtol=1e-5)


def test_the_golden_files_are_what_their_script_describes():
    """The fixtures hold what the tests above take for granted: another teacher, scaled rope past its context."""
    config = json.loads((GOLDEN / "llama3/config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "llama3"
    student, teacher = (load_file(GOLDEN / name / "model.safetensors") for name in ("llama3", "llama3_teacher"))
    assert any(not np.array_equal(student[name], teacher[name]) for name in student)
