"""Gradients of the terms: against a direct formula on whole logits, on any mesh, and at the initial weights."""

import csv
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import take_devices
from etils import epath
from flax import nnx
from tiny_runs import ARCH, ITEMS, TOP8, moved, tiny_config, write_base, write_run

from configs import conventions
from nca_jax import settings
from nca_jax.analysis import gradients
from nca_jax.analysis.common import ALL, OUTSIDE, Checkpoint, as_csv, decoder_on, open_subject, respond
from nca_jax.assembly import abstract_inputs, assemble
from nca_jax.axes import named
from nca_jax.data.pipeline import encode_pairs
from nca_jax.domains import domain_of
from nca_jax.models.decoder import decoder_graph
from nca_jax.models.huggingface import load_params
from nca_jax.models.presets import preset
from nca_jax.models.source import open_model
from nca_jax.objectives import Divergence, Support
from nca_jax.plotting import save
from nca_jax.sharding import make_mesh, params_sharding
from nca_jax.stored_model import find_model
from nca_jax.train_step import Objective, TrainState, make_loss_and_gradient
from nca_jax.vocab_loss import Terms


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def checkpoints(base, tmp_path_factory):
    """The base, and a run's checkpoint."""
    run = write_run(tmp_path_factory.mktemp("run") / "run", tiny_config(base), {2: moved(base, 1, 0.05)})
    return [Checkpoint(path.name, str(path), find_model(str(path))) for path in (base, run)]


@pytest.fixture(scope="module")
def alone(base, checkpoints):
    """Subject and measurements on one device, all items in one micro-batch."""
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        subject = open_subject(tiny_config(base, batch_size=8, **TOP8), checkpoints[0].model, ITEMS)
        return subject, gradients.measure(subject, checkpoints, checkpoints[0].model)


def dense_terms(config, base, trained, response_ExR, mask_ExR):
    """A function of the trained weights to the three terms: whole logits of whole sequences, summed item by item."""
    model, domain = open_model(str(base)), domain_of(config)
    prompts = [domain.messages(example) for example in domain.examples("validation")[:ITEMS]]
    pairs = encode_pairs(model.chat_format(config.chat), prompts, domain.context)
    responses = [response_R[mask_R] for response_R, mask_R in zip(response_ExR, mask_ExR, strict=True)]
    prompts = [pair.no_context for pair in pairs] + [pair.with_context for pair in pairs]
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses * 2, strict=True)]
    longest = max(map(len, sequences))
    token_BxT = jnp.asarray([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])

    def log_probabilities(params) -> list[jax.Array]:
        hidden_BxTxD, _ = nnx.merge(decoder_graph(ARCH), params)(token_BxT, jnp.arange(longest)[None])
        logits_BxTxV = (hidden_BxTxD @ params["embedding"].T)[..., : len(model.tokenizer)] / config.rollout.temperature
        log_p_BxTxV = jax.nn.log_softmax(logits_BxTxV)
        return [
            log_p_BxTxV[i, len(prompt) - 1 : len(sequence) - 1]
            for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True))
        ]

    teacher = log_probabilities(load_params(base, ARCH))[ITEMS:]

    def kl(log_p_RxV, log_q_RxV, ids_Rxk) -> jax.Array:
        p, q = (jax.nn.log_softmax(jnp.take_along_axis(x, ids_Rxk, axis=1)) for x in (log_p_RxV, log_q_RxV))
        return jnp.sum(jnp.exp(p) * (p - q))

    def terms(params) -> dict[str, jax.Array]:
        found = log_probabilities(params)
        total = dict.fromkeys(gradients.TERMS, 0.0)
        for x, c, f in zip(found[:ITEMS], found[ITEMS:], teacher, strict=True):
            k = config.loss.top_k if config.loss.support != "full" else x.shape[1]
            of_x, of_c = (jax.lax.top_k(jax.lax.stop_gradient(of), k)[1] for of in (x, c))
            total["opd"] += kl(x, f, of_x)
            total["nca"] += kl(jax.lax.stop_gradient(x), c, of_x)
            total["fidelity"] += kl(c, f, of_c)
        return {name: value / mask_ExR.sum() for name, value in total.items()}

    return terms


def test_terms_and_gradients_are_those_of_whole_logits(base, checkpoints, alone):
    config, (subject, measured) = tiny_config(base, **TOP8), alone
    params = {name: jnp.asarray(w) for name, w in moved(base, 1, 0.05).items()}
    response_ExR, mask_ExR = respond(subject, params, config.rollout)
    terms = dense_terms(config, base, params, response_ExR, mask_ExR)

    @jax.jit
    def expected(params):
        return terms(params), {name: jax.grad(lambda p, name=name: terms(p)[name])(params) for name in gradients.TERMS}

    value, gradient = jax.device_get(expected(params))
    pull = measured[1]
    for name in gradients.TERMS:
        assert value[name] > 0.01
        np.testing.assert_allclose(pull.value[name], value[name], rtol=1e-4)

    def dot(one, other, names, layer=...) -> float:
        return sum(np.vdot(gradient[one][n][layer].astype(float), gradient[other][n][layer]) for n in names)

    weights = list(params)
    groups = {(ALL, ALL): (weights, ...), (ALL, "key"): (["key"], ...), (1, "down"): (["down"], 1)}
    groups[2, "norms"] = (["attention_norm", "mlp_norm", "query_norm", "key_norm"], 2)
    groups[OUTSIDE, ALL] = (["embedding", "final_norm"], ...)
    for group, of_group in groups.items():
        for name in gradients.TERMS:
            np.testing.assert_allclose(pull.norm(name, group), dot(name, name, *of_group) ** 0.5, rtol=1e-4)
        for a, b in gradients.PAIRS:
            cosine = dot(a, b, *of_group) / (dot(a, a, *of_group) * dot(b, b, *of_group)) ** 0.5
            assert pull.cosine(a, b, group) == pytest.approx(cosine, abs=1e-4)


def test_at_the_initial_weights_fidelity_has_no_gradient(alone):
    """The student with the context is the teacher there, so that OPD, KL(q_x || f), and NCA, KL(q_x || q_c), are
    equal."""
    _, (initial, _) = alone
    assert initial.value["fidelity"] == 0 and initial.norm("fidelity", (ALL, ALL)) == 0
    assert initial.value["opd"] == pytest.approx(initial.value["nca"], rel=1e-5) and initial.value["opd"] > 0.01
    for group in initial.product["opd", "opd"]:
        assert initial.cosine("opd", "fidelity", group) is None and initial.cosine("nca", "fidelity", group) is None
        assert -1 <= initial.cosine("opd", "nca", group) <= 1


@pytest.mark.slow  # compiles everything for another mesh
def test_on_eight_devices_and_in_micro_batches_the_same(base, checkpoints, alone):
    """Four groups of two devices, so four rows at once; the second time, three of the rows are padding."""
    config = tiny_config(base, **TOP8, **{"mesh.fsdp": 4, "mesh.tensor": 2})
    subject = open_subject(config, checkpoints[0].model, ITEMS)
    (pull,), expected = gradients.measure(subject, checkpoints[1:], checkpoints[0].model), alone[1][1]
    assert pull.value == pytest.approx(expected.value, rel=1e-4)
    for group in expected.product["opd", "opd"]:
        for a, b in gradients.PAIRS:
            assert pull.cosine(a, b, group) == pytest.approx(expected.cosine(a, b, group), abs=1e-4)
        for name in gradients.TERMS:
            assert pull.norm(name, group) == pytest.approx(expected.norm(name, group), rel=1e-4)


def test_the_terms_of_other_configs():
    """SFT has no divergence of its own; the target of NCA stands where the step has its teacher."""
    terms = Terms(9, first="nll", support=Support("student_top_k", 4, "bucket"), temperature=0.5)
    objectives = gradients.term_objectives(Objective(terms, beta=0.5, reduction="sequence"))
    assert {objective.reduction for objective in objectives.values()} == {"sequence"}
    assert {name: o.terms.first.kind for name, o in objectives.items()} == {
        "opd": "reverse_kl",
        "nca": "forward_kl",
        "fidelity": "reverse_kl",
    }
    assert {name: o.terms.support.kind for name, o in objectives.items()} == {
        "opd": "student_top_k",
        "nca": "teacher_top_k",
        "fidelity": "student_top_k",
    }
    jsd = Divergence("jsd", entry_clip=3.0)
    objectives = gradients.term_objectives(Objective(Terms(9, first=jsd)))
    assert objectives["opd"].terms.first == objectives["fidelity"].terms.first == jsd
    assert objectives["nca"].terms.first == Divergence("forward_kl", entry_clip=3.0)
    assert {objective.terms.support.kind for objective in objectives.values()} == {"full"}


def test_the_sentence_and_the_table(base, alone, checkpoints, monkeypatch, tmp_path):
    """Gradients that are right-angled, opposite and none, in two weights."""
    subject, _ = alone
    key, embedding = [np.array([[3.0, 0.0]]), np.array([[0.0, 2.0]]), np.array([[0.0, -4.0]])], [4.0, 0.0, 0.0]
    dots = {
        (gradients.TERMS[i], gradients.TERMS[j]): {
            (0, "key"): float(np.vdot(key[i], key[j])),
            (0, ALL): float(np.vdot(key[i], key[j])),
            (OUTSIDE, "embedding"): embedding[i] * embedding[j],
            (ALL, "key"): float(np.vdot(key[i], key[j])),
            (ALL, ALL): float(np.vdot(key[i], key[j])) + embedding[i] * embedding[j],
        }
        for i, j in itertools.combinations_with_replacement(range(3), 2)
    }
    still = dots | {pair: dict.fromkeys(of, 0.0) for pair, of in dots.items() if "fidelity" in pair}
    pulls = [gradients.Pull({"opd": 1.5, "nca": 1.0, "fidelity": 0.0}, of) for of in (still, dots)]
    monkeypatch.setattr(gradients, "measure", lambda *_: pulls)
    finding = gradients.study(subject, checkpoints, checkpoints[0].model)
    first, second = (checkpoint.label for checkpoint in checkpoints)
    assert f"OPD and NCA 0.000 at {first} and 0.000 at {second}; OPD and fidelity 0.000 at {second}" in finding.sentence
    assert f"NCA and fidelity -1.000 at {second} (at {first}, which is the teacher" in finding.sentence
    assert "at temperature 0.7" in finding.sentence
    rows = list(csv.DictReader(io.StringIO(as_csv(finding.rows))))
    assert "nan" not in as_csv(finding.rows)
    whole = {row["checkpoint"]: row for row in rows if (row["layer"], row["module"]) == (ALL, ALL)}
    assert whole[first]["cosine_nca_fidelity"] == "" and whole[first]["value_opd"] == "1.5"
    assert whole[second]["norm_opd"] == "5" and whole[second]["norm_fidelity"] == "4"
    outside = [row for row in rows if row["layer"] == OUTSIDE]
    assert [row["cosine_opd_nca"] for row in outside] == ["", ""] and outside[0]["norm_opd"] == "4"
    save(finding.figure, epath.Path(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.slow  # compiles a real model's step twice
def test_no_more_memory_than_a_training_step():
    """As compiled for SmolLM2-135M: the third gradient beside two others, and the step beside its moments."""
    config = conventions.get_config()
    config.update_from_flattened_dict({"accumulation": 2, "mesh.fsdp": 1, "loss.support": "student_top_k"})
    arch, vocab_size = preset("smollm2_135m"), 49152
    mesh = make_mesh(config.mesh, devices=jax.devices()[:1])
    job = assemble(config, arch, arch, [2], vocab_size, mesh)
    state, teacher, batch = abstract_inputs(config, job, arch, mesh, prompt=64, template=24, context=128)
    objective = gradients.term_objectives(settings.make_objective(config, vocab_size))["fidelity"]
    graph, sharding = decoder_on(config, arch, mesh), params_sharding(mesh, arch)
    gradient = jax.jit(
        make_loss_and_gradient(graph, graph, objective, 2, mesh), out_shardings=(named(mesh), sharding, named(mesh))
    )

    def needed(function, *arguments) -> int:
        memory = function.lower(*arguments).compile().memory_analysis()
        arguments_and_results = memory.argument_size_in_bytes + memory.output_size_in_bytes
        return arguments_and_results - memory.alias_size_in_bytes + memory.temp_size_in_bytes

    one = sum(x.size * x.dtype.itemsize for x in state.params.values())
    weights = TrainState(jax.ShapeDtypeStruct((), jnp.int32), state.params, None)
    third = needed(gradient, weights, *gradients.term_inputs("fidelity", batch, teacher, teacher))
    assert third + 2 * one <= needed(job.train_step, state, teacher, batch)
