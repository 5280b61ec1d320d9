"""Updates of the weights: against numpy on the files, whatever kind of checkpoint they are in."""

import csv
import io
import json

import numpy as np
import pytest
from conftest import random_tensors
from etils import epath
from safetensors.numpy import load_file, save_file
from tiny_runs import ARCH, moved, moved_tensors, tiny_config, write_base, write_run

from nca_jax import convert
from nca_jax.analysis import updates
from nca_jax.analysis.common import ALL, OUTSIDE, Checkpoint, as_csv
from nca_jax.errors import UserError
from nca_jax.models.huggingface import load_params
from nca_jax.plotting import save
from nca_jax.stored_model import find_model

# Module -> what is in the names of its tensors.
TENSORS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    "norms": "norm",
    "embedding": "embed_tokens",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "model")


def with_tensors(directory, tensors):
    """A model directory of these tensors."""
    write_base(directory)
    save_file(tensors, directory / "model.safetensors")
    return directory


def checkpoint(path) -> Checkpoint:
    return Checkpoint(path.name, str(path), find_model(str(path)))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two checkpoints, in Hugging Face's format."""
    directory = tmp_path_factory.mktemp("two")
    return [with_tensors(directory / name, moved_tensors(seed, 0.1)) for seed, name in enumerate(("one", "other"), 1)]


def in_file(directory, module: str, layer: int | str) -> np.ndarray:
    """All numbers of a module in a layer of the file, as one vector in float64."""
    chosen = [
        tensor.astype(np.float64).ravel()
        for name, tensor in sorted(load_file(directory / "model.safetensors").items())
        if (module == ALL or TENSORS[module] in name)
        and (layer == ALL or (f".layers.{layer}." in name if layer != OUTSIDE else ".layers." not in name))
    ]
    return np.concatenate(chosen)


def test_norms_shares_and_angles_are_those_of_the_files(base, two):
    finding = updates.study(find_model(str(base)), [checkpoint(path) for path in two])
    whole = [in_file(path, ALL, ALL) - in_file(base, ALL, ALL) for path in two]
    groups = {(row["layer"], row["module"]) for row in finding.rows}
    in_layers = {"query", "key", "value", "output", "gate", "up", "down", "norms", ALL}
    expected = {(layer, module) for layer in range(ARCH.num_layers) for module in in_layers}
    expected |= {(OUTSIDE, module) for module in ("embedding", "norms", ALL)}
    assert groups == expected | {(ALL, module) for module in in_layers | {"embedding"}}
    for row in finding.rows:
        layer, module = row["layer"], row["module"]
        weights = in_file(base, module, layer)
        one, other = (in_file(path, module, layer) - weights for path in two)
        if row["other"]:
            assert (row["checkpoint"], row["other"]) == ("one", "other")
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert row["angle_degrees"] == pytest.approx(np.degrees(np.arccos(cosine)), rel=1e-9)
            continue
        update = {"one": one, "other": other}[row["checkpoint"]]
        of_all = whole[["one", "other"].index(row["checkpoint"])]
        assert row["norm"] == pytest.approx(np.linalg.norm(update), rel=1e-12)
        assert row["relative_norm"] == pytest.approx(np.linalg.norm(update) / np.linalg.norm(weights), rel=1e-12)
        assert row["share"] == pytest.approx(update @ update / (of_all @ of_all), rel=1e-12)
        assert row["angle_degrees"] is None


def test_checkpoints_of_every_kind_are_read_beside_each_other(base, two, tmp_path, capsys):
    """Imported models are stored by layer, the others by weight; alone the imported ones are read by layer."""
    imported = []
    for path in (base, *two):
        assert convert.main(["import", f"--source={path}", f"--output={tmp_path / path.name}"]) == 0
        imported.append(find_model(str(tmp_path / path.name)))
    run = write_run(
        tmp_path / "run", tiny_config(base), {3: {k: np.asarray(w) for k, w in load_params(two[1], ARCH).items()}}
    )
    plain = [find_model(str(path)) for path in (base, *two)]
    expected = updates.measure(plain[0], [checkpoint(path) for path in two])
    mixed = [plain[0], imported[1], find_model(str(run))]
    for first, *others in (imported, mixed, [imported[0], plain[1], imported[2]]):
        found = updates.measure(first, [Checkpoint("", "", model) for model in others])
        for name, products in expected.items():
            np.testing.assert_allclose(found[name], products, rtol=1e-12, err_msg=name)


def test_an_imported_model_of_other_weights_is_refused(base, two, tmp_path):
    assert convert.main(["import", f"--source={two[0]}", f"--output={tmp_path / 'imported'}"]) == 0
    config = json.loads((tmp_path / "imported/config.json").read_text())
    (tmp_path / "imported/config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    imported = checkpoint(tmp_path / "imported")
    with pytest.raises(UserError, match="does not hold the weights"):
        updates.readers([find_model(str(base)), imported.model])


def test_blocks_change_nothing(base, two, monkeypatch):
    models = find_model(str(base)), [checkpoint(path) for path in two]
    expected = updates.measure(*models)
    monkeypatch.setattr(updates, "_BLOCK", 100)
    for name, products in updates.measure(*models).items():
        np.testing.assert_allclose(products, expected[name], rtol=1e-12, err_msg=name)


def test_known_updates(base, tmp_path):
    """A step forth, the same back, one across, and none."""
    tensors = random_tensors(ARCH)
    key = "model.layers.1.self_attn.k_proj.weight"
    forth, across = np.zeros_like(tensors[key]), np.zeros_like(tensors[key])
    forth[0, 0], across[1, 1] = 3.0, 4.0
    steps = {"forth": forth, "back": -forth, "across": across, "none": np.zeros_like(forth)}
    paths = [with_tensors(tmp_path / name, tensors | {key: tensors[key] + step}) for name, step in steps.items()]
    finding = updates.study(find_model(str(base)), [checkpoint(path) for path in paths])
    rows = list(csv.DictReader(io.StringIO(as_csv(finding.rows))))
    assert "nan" not in as_csv(finding.rows)
    angle = {(r["checkpoint"], r["other"], r["layer"], r["module"]): r["angle_degrees"] for r in rows if r["other"]}
    assert float(angle["forth", "back", "1", "key"]) == pytest.approx(180, abs=1e-3)
    assert float(angle["forth", "across", "1", "key"]) == pytest.approx(90, abs=1e-3)
    assert angle["forth", "none", "1", "key"] == angle["forth", "back", "0", "key"] == ""
    of_key = {r["checkpoint"]: r for r in rows if not r["other"] and (r["layer"], r["module"]) == ("1", "key")}
    assert float(of_key["across"]["norm"]) == pytest.approx(4, rel=1e-6) and of_key["across"]["share"] == "1"
    assert (of_key["none"]["norm"], of_key["none"]["share"]) == ("0", "")
    assert "the updates of forth and back are 180 degrees apart" in finding.sentence
    assert "none has the base's weights" in finding.sentence and "back and none" not in finding.sentence
    assert "relative to them most in key" in finding.sentence and "0% of the squared update is in" in finding.sentence
    save(finding.figure, epath.Path(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_weights_of_a_run_are_those_of_the_step(base, tmp_path):
    run = write_run(tmp_path / "run", tiny_config(base), {2: moved(base, 1, 0.1), 4: moved(base, 2, 0.3)})
    model = find_model(str(base))
    by_step = [
        updates.Moves(
            updates.sums_by_group(updates.measure(model, [Checkpoint("", "", find_model(str(run), step))]), ARCH)
        )
        for step in (2, 4, None)
    ]
    sizes = [moves.norm(1, (ALL, ALL)) for moves in by_step]
    count = sum(tensor.size for tensor in random_tensors(ARCH).values())
    # Noise of that standard deviation on every weight.
    np.testing.assert_allclose(sizes, np.array([0.1, 0.3, 0.3]) * count**0.5, rtol=0.02)
