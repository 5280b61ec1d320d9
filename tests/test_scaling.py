"""How cost grows: slopes of made-up times, bytes and FLOPs by hand, and communication of real programs."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from benchmarks import machine, scaling, scaling_mesh, scaling_time
from benchmarks.scaling_mesh import Case, Lengths, closed_form
from benchmarks.scaling_time import Sizes
from nca_jax.models.decoder import random_params
from nca_jax.models.presets import preset
from nca_jax.sharding import make_mesh

LIMITS = {"GFLOP/s": 200.0, "GB/s": 40.0}


def test_the_slope_of_a_power_is_its_exponent_and_a_line_is_found_again():
    sizes = np.array([2, 4, 8, 32])
    assert scaling_time.slope(sizes, 3.0 * sizes**1.5) == pytest.approx(1.5)
    found = scaling_time.line(sizes, 0.25 + 0.01 * sizes)
    assert found == {"per unit": pytest.approx(0.01), "fixed": pytest.approx(0.25)}


def test_a_part_that_does_not_grow_makes_the_slope_smaller():
    # 1 + x from 1 to 3: on logarithmic axes from log 2 to log 4.
    assert scaling_time.slope([1, 3], [2.0, 4.0]) == pytest.approx(math.log(2) / math.log(3))


def test_a_token_is_what_a_longer_rollout_takes_more_round_by_round():
    # 4 tokens more: 1/4, 8/4, 3/4; the difference of the medians would be (6 - 2) / 4.
    assert scaling_time.token_seconds([1.0, 2.0, 3.0], [2.0, 10.0, 6.0], 4) == 0.75


@pytest.mark.parametrize(
    ("point", "floor", "shares"),
    [
        # 100 GFLOP in 1 s of at most 200 GFLOP/s.
        ({"seconds": 1.0, "FLOPs": 1e11}, 0.5, {"GFLOP/s": 0.5}),
        # 10 GFLOP need 0.05 s, 8 GB 0.2 s.
        ({"seconds": 0.4, "FLOPs": 1e10, "bytes": 8e9}, 0.2, {"GFLOP/s": 0.125, "GB/s": 0.5}),
    ],
    ids=["arithmetic", "reading"],
)
def test_shares_and_the_least_time_follow_from_the_limits(point, floor, shares):
    assert scaling_time.floor_seconds(point, LIMITS) == pytest.approx(floor)
    found = scaling_time.reached(point, LIMITS)
    assert {unit: found[f"share of {unit}"] for unit in shares} == pytest.approx(shares)
    assert ("GB/s" in found) == ("bytes" in point)


ARCH = dataclasses.replace(
    preset("tiny_llama3"),
    hidden_size=4,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    mlp_size=5,
    vocab_size=7,
)
# Matrices of a layer: query 4x4, key and value 4x2 each, output 4x4, gate, up and down 4x5 each.
MATRICES = 16 + 2 * 8 + 16 + 3 * 20
# And two norms of 4; outside of the layers embedding, which is the head, and the last norm.
LAYERS = 3 * (MATRICES + 2 * 4)
PARAMETERS = LAYERS + 7 * 4 + 4


def test_the_cost_of_a_token_by_hand():
    sizes = Sizes(batch=2, response=3, context=10)
    cost = scaling_time.decode_cost(ARCH, sizes)
    # Tokens 1, 2, 3 behind a prompt of 32 see, with themselves, 43, 44, 45 keys, each 2 products of 2 heads x 2.
    attention = 2 * 2 * (2 * 2) * 44
    assert cost.flops == pytest.approx(2 * (3 * (2 * MATRICES + attention) + 2 * 4 * 7))
    # The context once, of each row the prompt and on average one response token; keys and values of 2 in 3 layers.
    cached = 10 + 2 * (32 + 1)
    assert cost.nbytes == 4 * (PARAMETERS + cached * 3 * 2 * 2)


def test_the_cost_of_a_step_leaves_out_what_is_computed_twice():
    sizes = Sizes(batch=2, response=4, context=10)
    T, header, L = 32 + 4, 20, 3

    def layers(tokens, prefix):
        return L * (2 * MATRICES * tokens + 4 * 4 * (tokens * prefix + tokens * (tokens + 1) / 2))

    views = 3 * layers(T, header) + (3 + 1) * layers(T, 10)
    heads = (3 + 3 + 1) * 4 * 2 * 4 * 7
    expected = 2 * (views + heads) + 3 * (layers(header, 0) + layers(10, 0))
    assert scaling_time.step_cost(ARCH, sizes).flops == pytest.approx(expected)


def test_step_and_decode_run_again_and_again():
    sizes = Sizes(batch=2, response=3, context=5)
    arch = dataclasses.replace(ARCH, vocab_size=64)
    params = random_params(arch, 0)
    run, seconds = scaling_time.make_step(arch, params, sizes)
    losses = [float(run()) for _ in range(3)]
    assert seconds > 0 and len(set(losses)) == 3, "each step begins with what the one before has left"
    rollouts, _ = scaling_time.make_decode(arch, params, sizes)
    drawn = {name: rollout() for name, rollout in rollouts.items()}
    assert {name: found.response_BxR.shape for name, found in drawn.items()} == {"prefill": (2, 1), "all": (2, 4)}
    assert all(found.mask_BxR.all() for found in drawn.values()), "no token ends a response"


def test_a_sweep_has_a_point_for_each_size_with_the_cost_of_that_size(monkeypatch):
    def seconds(runs, repeats):
        parts = {"step": 6.0, "prefill": 1.0, "all": 5.0}
        return {name: [parts[name.split(", ")[1]] * int(name.split()[1].rstrip(","))] * repeats for name in runs}

    monkeypatch.setattr(scaling_time, "SMALL", dataclasses.replace(ARCH, vocab_size=64))
    monkeypatch.setattr(scaling_time, "interleaved", seconds)
    monkeypatch.setattr(scaling_time, "make_step", lambda *_: (None, 0.5))
    monkeypatch.setattr(scaling_time, "make_decode", lambda *_: ({"prefill": None, "all": None}, 0.25))
    found = scaling_time.sweep("response", (2, 4), 3)
    assert found["sizes"] == [2, 4]
    assert [point["seconds"] for point in found["step"]] == [12.0, 24.0]
    assert [point["seconds"] for point in found["decode"]] == [(10 - 2) / 2, (20 - 4) / 4]
    assert found["step"][1]["FLOPs"] > found["step"][0]["FLOPs"] and found["step"][0]["compile seconds"] == 0.5
    assert found["decode"][1]["bytes"] > found["decode"][0]["bytes"]


def test_the_limits_are_the_higher_ones_of_before_and_after(monkeypatch):
    measured = iter([{"GFLOP/s": 100.0, "GB/s": 30.0}, {"GFLOP/s": 90.0, "GB/s": 35.0}])
    monkeypatch.setattr(machine, "limits", lambda: next(measured))
    found = scaling.with_limits(lambda: {"rows": [1]})
    assert found["limits"] == {"GFLOP/s": 100.0, "GB/s": 35.0} and found["rows"] == [1]


def test_rates_are_work_over_the_fastest_call(monkeypatch):
    monkeypatch.setattr(machine, "best_seconds", lambda run, repeats: (run(), 0.5)[1])
    (row,) = machine.matrix_rates([(20, 30, 40)])
    assert row["jax"] == row["numpy"] == pytest.approx(2 * 20 * 30 * 40 / 0.5 / 1e9)
    found = machine.bandwidths(megabytes=0.1)
    nbytes = 6 * 4096 * 4  # whole rows of 4096 within 0.1 MB
    assert found["read"]["jax"] == pytest.approx(nbytes / 0.5 / 1e9)
    assert found["update"]["numpy"] == pytest.approx(2 * nbytes / 0.5 / 1e9)


def test_the_fastest_call_counts_and_the_first_one_does_not(monkeypatch):
    clock = iter([0.0, 0.1, 1.0, 4.0, 10.0, 12.0])  # 0.1 to warm up, then 3 and 2
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.best_seconds(lambda: None, repeats=2) == 2.0


def test_a_models_products():
    assert machine.model_shapes(ARCH, 9) == [(9, 4, 2), (9, 4, 4), (9, 4, 5), (9, 4, 7), (9, 5, 4)]


LENGTHS = Lengths(prompt=6, template=2, context=8, response=4)


def mesh_of(replica=1, data=1, fsdp=1, tensor=1):
    return {"replica": replica, "data": data, "fsdp": fsdp, "tensor": tensor}


def test_one_device_receives_nothing():
    assert set(closed_form(ARCH, mesh_of(), 1, LENGTHS, 4).values()) == {0}


def test_bytes_of_copies_by_hand():
    # 2 slices of 2 copies: an all-reduce over 4 brings 2 * 3/4 of all gradients; a slice shares out the prefixes.
    found = closed_form(ARCH, mesh_of(replica=2, data=2), 4, LENGTHS, 2)
    assert found["gradients"] == 1.5 * PARAMETERS * 2
    assert found["prefixes"] == pytest.approx(3 * 0.5 * 2 * 3 * (2 * 1 * 2) * (2 + 8))
    assert found["weights"] == found["activations"] == found["loss"] == found["embedding"] == 0


def test_bytes_of_shards_by_hand():
    found = closed_form(ARCH, mesh_of(fsdp=4), 8, LENGTHS, 2)
    assert found["weights"] == 5 * 0.75 * LAYERS * 2
    assert found["gradients"] == 2 * 0.75 * LAYERS * 2
    # 2 rows a device: the hidden states of the others' 6 rows, 4 positions of width 4; three in, two gradients back.
    assert found["loss"] == 6 * 4 * 4 * (3 * 2 + 2 * 4)
    assert found["embedding"] == 5 * 0.75 * 2 * 2 * (6 + 4) * 4


def test_bytes_of_tensor_parallelism_by_hand():
    found = closed_form(ARCH, mesh_of(tensor=2), 1, LENGTHS, 4)
    # In 3 layers sums of width 4, each an all-reduce of 2: of two views 5 for each of 10 tokens, of the teacher 2, and
    # of the 10 tokens of the prefixes 5.
    assert found["activations"] == 1.0 * 4 * 3 * 4 * (10 * 12 + 10 * 5)
    assert sum(found.values()) == found["activations"]


def test_the_loss_moves_more_to_a_device_the_more_share_the_vocabulary():
    """While what weights cost stays below a bound: so an fsdp axis has a size from which on more copies are better."""
    loss = [closed_form(ARCH, mesh_of(fsdp=n), n, LENGTHS, 2)["loss"] for n in (2, 4, 8)]
    assert loss == [loss[0], 3 * loss[0], 7 * loss[0]]
    assert closed_form(ARCH, mesh_of(fsdp=1024), 1024, LENGTHS, 2)["weights"] < 5 * LAYERS * 2


@pytest.mark.parametrize(("data", "tensor"), [(8, 1), (1, 8)])
def test_a_compiled_step_receives_what_the_closed_form_says_or_more(data, tensor, monkeypatch):
    monkeypatch.setitem(scaling_mesh.MODELS, "tiny", preset("tiny_llama3"))
    monkeypatch.setitem(scaling_mesh.LENGTHS, "tiny", LENGTHS)
    found = scaling_mesh.compiled(Case("tiny", "cpu:8", data=data, tensor=tensor))
    assert found["devices"] == 8 and found["rows"] == data
    assert found["mesh"] == mesh_of(data=data, tensor=tensor) == dict(make_mesh(found["mesh"], jax.devices()).shape)
    received = sum(c["nbytes"] for c in found["collectives"])
    least = sum(found["closed form"].values())
    assert least < received < 6 * least
    assert not any(c["between_slices"] for c in found["collectives"])


def test_what_is_known_is_not_compiled_again_and_each_case_is_kept_at_once(monkeypatch):
    cases = [Case("small", "cpu:2"), Case("small", "cpu:4", data=4)]
    monkeypatch.setattr(scaling_mesh, "SIMULATED", cases)
    monkeypatch.setattr(scaling_mesh.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(scaling_mesh, "in_child", lambda case: {"compile seconds": case.devices})
    kept = []
    scaling_mesh.measure({cases[0].key: {"old": True}}, lambda found: kept.append(dict(found)))
    assert [list(found) for found in kept] == [[cases[0].key, cases[1].key]]
    assert kept[0][cases[0].key] == {"old": True} and kept[0][cases[1].key]["data"] == 4


def test_a_child_that_fails_says_why():
    with pytest.raises(RuntimeError, match="no_such_model"):
        scaling_mesh.in_child(Case("no_such_model", "cpu:1"))


def test_topologies_name_as_many_chips_as_they_are_listed_for():
    assert {n: Case("small", f"v5p:{shape}").devices for n, shape in scaling_mesh.V5P.items()} == {
        n: n for n in (8, 16, 64, 256, 1024, 4096)
    }
    assert Case("small", "v5e:16x16", 16).devices == 4096


def results():
    """As a run leaves them, with made-up numbers."""
    point = {"seconds": 0.5, "FLOPs": 5e10, "compile seconds": 1.0}
    swept = {"sizes": [2, 4], "step": [point | {"seconds": 0.75}, point | {"seconds": 1.0, "FLOPs": 1e11}]}
    swept["decode"] = [point | {"bytes": 4e9}, point | {"bytes": 4e9}]
    for what in ("step", "decode"):
        swept[f"growth of {what}"] = scaling_time.growth(swept["sizes"], swept[what], LIMITS)
    common = {"limits": LIMITS, "machine": "a machine", "repeats": 3}
    swept |= common | {"base": Sizes()._asdict()}
    rows = {
        "a": common | point | {"what": "step", "batch": 8, "response": 32, "context": 64},
        "b": common | point | {"what": "decode", "batch": 1, "response": 32, "context": 64, "bytes": 4e9},
    }
    products = [{"m k n": [1, 2, 3], "jax": 10.4, "numpy": 20.6}]
    memory = {"read": {"jax": 1.25, "numpy": 2.0}, "update": {"jax": 3.0, "numpy": 4.0}}
    collective = {"kind": "all-gather", "between_slices": False, "count": 3, "nbytes": 2e6}
    case = Case("small", "v5e:16x16", 4, data=1)
    compiled = case._asdict() | {
        "devices": 1024,
        "mesh": mesh_of(4, 1, 256),
        "collectives": [collective, collective | {"kind": "all-reduce", "between_slices": True, "nbytes": 5e5}],
        "closed form": {"weights": 1e6, "loss": 2.5e6, "activations": 0.0},
    }
    return {
        "time": {"batch": swept, "layers": swept | {"limits": {"GFLOP/s": 100.0, "GB/s": 40.0}}},
        "limits": {"rows": rows, "measured": {"matrix products, GFLOP/s": products, "memory, GB/s": memory}},
        "communication": {case.key: compiled},
    }


def test_tables_say_what_is_in_the_results():
    lines = scaling.tables(results()).split("\n")
    assert "| matrix product, GFLOP/s | [1, 2] @ [2, 3] | 10 | 21 |" in lines
    assert "| NCA step | 8 | 64 | 0.500 | 50 | 100.0 | 50% |  |  |  |" in lines
    assert "| a token of every row | 1 | 64 | 0.500 | 50 | 100.0 | 50% | 4.00 | 8.0 | 20% |" in lines
    # log2(1 / 0.75); 0.25 s between 2 and 4.
    assert "| batch | 2, 4 | NCA step | 0.42 | 1.00 | 1.00 | 125 | 500 | 33%, 50% |" in lines
    # At half the rate the least times are longer and the shares larger.
    assert "| layers | 2, 4 | NCA step | 0.42 | 1.00 | 1.00 | 125 | 500 | 67%, 100% |" in lines
    assert "(Limits measured before and after: 100-200 GFLOP/s, 40 GB/s. Medians of 3 rounds. a machine.)" in lines
    assert (
        "| small | 1024: 4 x v5e:16x16 | 4 x 1 x 256 x 1 | 2 | 0 | 0.5 | 0 | 0 | 0.5 | 2.5 | 3.5 | "
        "loss 2.5, weights 1 |" in lines
    )


def test_the_figure_has_a_panel_for_each_size_with_what_the_limits_leave():
    figure = scaling.draw_figure(results()["time"])
    assert [axes.get_xlabel() for axes in figure.axes] == ["batch", "layers"]
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].get_lines()}
    assert lines["NCA step"] == [0.75, 1.0] and lines["NCA step, at the limits"] == [0.25, 0.5]
    # 4 GB at 40 GB/s take 0.1 s, and the arithmetic longer.
    assert lines["one token of every row, at the limits"] == [0.25, 0.25]


def test_what_is_not_measured_is_kept(tmp_path, monkeypatch, capsys):
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps(results()))
    monkeypatch.setattr(scaling, "RESULTS", path)
    monkeypatch.setattr(scaling, "FIGURE", tmp_path / "figure.png")
    again = {"matrix products, GFLOP/s": [], "memory, GB/s": {}}
    monkeypatch.setattr(machine, "measure", lambda arch, tokens: again)
    monkeypatch.setattr(scaling, "MODEL_POINTS", [("decode", 4, 64)])
    monkeypatch.setattr(
        scaling, "measure_limits", lambda *point: results()["limits"]["rows"]["b"] | {"batch": point[1], "repeats": 5}
    )
    assert scaling.main(["--only=limits", "--repeats=5"]) == 0
    found = json.loads(path.read_text())
    assert found["limits"]["measured"] == again
    assert [row["batch"] for row in found["limits"]["rows"].values()] == [8, 1, 4]
    assert found["time"] == json.loads(json.dumps(results()["time"])) and "communication" in found
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "| a token of every row | 4 | 64 |" in capsys.readouterr().out

    # Of the sweeps too, and in the figure's order.
    monkeypatch.setattr(scaling, "measure_time", lambda name, repeats: results()["time"]["batch"] | {"new": name})
    assert scaling.main(["--only=time", "--sizes=context,batch"]) == 0
    assert [(name, swept.get("new")) for name, swept in json.loads(path.read_text())["time"].items()] == [
        ("batch", "batch"),
        ("context", "context"),
        ("layers", None),
    ]
