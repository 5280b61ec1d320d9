"""Cosines of the two views: against decoders of fewer layers, on any mesh, and what they cost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import take_devices
from etils import epath
from flax import nnx
from tiny_runs import ARCH, ITEMS, moved, tiny_config, write_base, write_run

from nca_jax.analysis import representations
from nca_jax.analysis.common import Checkpoint, open_subject, respond
from nca_jax.data.pipeline import encode_pairs
from nca_jax.domains import domain_of
from nca_jax.models.decoder import Stream, decoder_graph, random_params, weight_table
from nca_jax.models.huggingface import load_params
from nca_jax.models.layers import is_stacked
from nca_jax.models.source import open_model
from nca_jax.plotting import save
from nca_jax.stored_model import find_model
from nca_jax.views import View


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def checkpoints(base, tmp_path_factory):
    """The base, and a run's checkpoint."""
    run = write_run(tmp_path_factory.mktemp("run") / "run", tiny_config(base), {2: moved(base, 1)})
    return [Checkpoint(path.name, str(path), find_model(str(path))) for path in (base, run)]


@pytest.fixture(scope="module")
def alone(base, checkpoints):
    """Subject and measurements on one device."""
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        subject = open_subject(tiny_config(base), checkpoints[0].model, ITEMS)
        return subject, representations.measure(subject, checkpoints)


def states_after(params, layers: int, sequences) -> list[np.ndarray]:
    """Hidden states [T, D] of whole sequences after some of the decoder's layers.

    A decoder of that many layers, without a scale in the norm that follows, which then changes no cosine; after all of
    the layers it is the decoder as it is.
    """
    table = weight_table(ARCH)
    params = {name: w[:layers] if is_stacked(table[name]) else w for name, w in params.items()}
    if layers > ARCH.num_layers:
        layers = ARCH.num_layers
    else:
        params["final_norm"] = jnp.ones(ARCH.hidden_size)
    longest = max(map(len, sequences))
    token_BxT = jnp.asarray([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
    graph = decoder_graph(dataclasses.replace(ARCH, num_layers=layers))
    run = jax.jit(lambda params: nnx.merge(graph, params)(token_BxT, jnp.arange(longest)[None])[0])
    hidden_BxTxD = np.asarray(run(params), np.float64)
    return [hidden_TxD[: len(sequence)] for hidden_TxD, sequence in zip(hidden_BxTxD, sequences, strict=True)]


def test_cosines_are_those_of_decoders_that_end_at_each_layer(base, alone):
    """Prompt and response in one sequence for each item and view, no prefix taken out."""
    config, (subject, (measured, _)) = tiny_config(base), alone
    params, model, domain = load_params(base, ARCH), open_model(str(base)), domain_of(config)
    prompts = [domain.messages(example) for example in domain.examples("validation")[:ITEMS]]
    pairs = encode_pairs(model.chat_format(config.chat), prompts, domain.context)
    response_ExR, mask_ExR = respond(subject, params, config.evaluation)
    responses = [response_R[mask_R] for response_R, mask_R in zip(response_ExR, mask_ExR, strict=True)]
    prompts = [pair.no_context for pair in pairs] + [pair.with_context for pair in pairs]
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses * 2, strict=True)]
    assert measured.cosine_ExL.shape == (ITEMS, ARCH.num_layers + 1)
    assert measured.tokens == sum(map(len, responses))
    for column in range(ARCH.num_layers + 1):
        states = states_after(params, column + 1, sequences)
        states = [of[len(prompt) - 1 : -1] for of, prompt in zip(states, prompts, strict=True)]
        for item, (x_RxD, c_RxD) in enumerate(zip(states[:ITEMS], states[ITEMS:], strict=True)):
            cosine_R = (x_RxD * c_RxD).sum(1) / np.linalg.norm(x_RxD, axis=1) / np.linalg.norm(c_RxD, axis=1)
            assert abs(cosine_R.mean()) < 0.999
            np.testing.assert_allclose(measured.cosine_ExL[item, column], cosine_R.mean(), atol=2e-5)


def test_equal_views_have_the_cosine_1(alone):
    subject, _ = alone
    params = random_params(ARCH, 0)
    view = subject.no_context.rows(range(2))
    response_BxR, mask_BxR = np.full((2, 3), 7), np.array([[True, True, True], [True, False, False]])
    rows = View(view.prefix_C, view.prompt_ExP, view.prompt_length_E)
    prefix = subject.answering.encode(params, jnp.asarray(view.prefix_C))
    cosines = representations.make_cosines(decoder_graph(ARCH))
    np.testing.assert_allclose(cosines(params, [prefix, prefix], [rows, rows], response_BxR, mask_BxR), 1.0, atol=1e-6)


def test_on_eight_devices_the_same(base, checkpoints, alone):
    config = tiny_config(base, **{"mesh.fsdp": 4, "mesh.tensor": 2, "mesh.decode_tensor": 2})
    subject = open_subject(config, checkpoints[0].model, ITEMS)
    assert subject.answering.mesh.shape["tensor"] == 2
    for found, expected in zip(representations.measure(subject, checkpoints), alone[1], strict=True):
        np.testing.assert_allclose(found.cosine_ExL, expected.cosine_ExL, atol=2e-5)
        assert found.tokens == expected.tokens


def test_no_layers_hidden_states_are_kept():
    """Many layers need no more memory than a few, but for their weights and the cosines themselves."""
    B, P, R = 4, 60, 4
    view = View(np.zeros(0, np.int32), np.zeros((B, P), np.int32), np.ones(B, np.int32))
    response_BxR = np.zeros((B, R), np.int32)

    def temporary_bytes(layers: int) -> int:
        arch = dataclasses.replace(ARCH, num_layers=layers)
        cosines = representations.make_cosines(decoder_graph(arch))
        params = jax.eval_shape(lambda: random_params(arch, 0))
        compiled = cosines.lower(params, [[], []], [view, view], response_BxR, np.ones((B, R), bool)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    of_hidden_states = 60 * 4 * B * (P + R) * ARCH.hidden_size  # of 60 layers in float32, of one of the views
    assert temporary_bytes(64) - temporary_bytes(4) < 0.05 * of_hidden_states


def test_what_is_not_observed_costs_nothing():
    """The program of a gradient is the same to the letter where nothing is observed."""
    params = random_params(ARCH, 0)

    def program(observe) -> str:
        def total(params, token_BxT):
            model = nnx.merge(decoder_graph(ARCH), params)
            found = model.together([Stream(token_BxT, jnp.arange(6)[None])], observe=observe)
            outputs, observed = found if observe else (found, None)
            return outputs[0][0].sum() + sum(x.sum() for x in jax.tree.leaves(observed))

        return jax.jit(jax.grad(total)).lower(params, jnp.ones((2, 6), jnp.int32)).as_text()

    plain = program(None)
    assert program(lambda states: None) == plain
    assert program(lambda states: states[0].sum()) != plain


def test_the_sentence_and_the_table(alone, checkpoints, monkeypatch, tmp_path):
    """Of three layers the upper two count; an item is a mean of its own."""
    subject, _ = alone
    cosine_ExL = np.array([[0.1, 0.8, 0.9, 0.5], [0.3, 0.8, 0.7, 0.6], [0.2, 0.8, 0.8, 0.7]])
    found = [representations.Agreement(cosine_ExL, 11), representations.Agreement(np.ones((3, 4)), 7)]
    monkeypatch.setattr(representations, "measure", lambda *_: found)
    finding = representations.study(subject, checkpoints)
    first, second = (checkpoint.label for checkpoint in checkpoints)
    # Means of the items over both layers: .85, .75, .8. The other model's items are all alike, which has no interval.
    assert f"cosine of 0.800 (0.750 to 0.850) in {first} and 1.000 in {second} (95 %" in finding.sentence
    assert "greedily" in finding.sentence
    assert [row["layer"] for row in finding.rows] == [0, 1, 2, "final_norm"] * 2
    by_layer = finding.rows[:4]
    np.testing.assert_allclose([row["cosine"] for row in by_layer], [0.2, 0.8, 0.8, 0.6])
    assert by_layer[0]["low"] < 0.2 < by_layer[0]["high"] and by_layer[1]["low"] is None
    assert {row["tokens"] for row in by_layer} == {11}
    save(finding.figure, epath.Path(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
