"""The compact file of a study's items holds what its item lines say."""

import numpy as np
import pytest
from etils import epath
from study_runs import VIEWS, write_run

from nca_jax.errors import UserError
from nca_jax.study_items import collect, load, save


@pytest.fixture
def study(tmp_path):
    before = {"no_context": "000", "with_context": "110"}
    write_run(tmp_path, "t", "opd", 0, {0: before, 5: {"no_context": "1-0", "with_context": "1+0"}})
    write_run(tmp_path, "t", "gated", 0, {5: {"no_context": "011", "with_context": "111", "other_task": "000"}}, 250.0)
    return tmp_path


def test_lines_as_arrays_and_back_from_the_file(study):
    runs = collect(epath.Path(study))
    path = epath.Path(study) / "tables" / "items.npz"
    save(runs, path)
    for gated, opd in (runs, load(path)):
        assert (opd.task, opd.method, opd.seed, opd.steps, opd.views) == ("t", "opd", 0, (0, 5), VIEWS)
        assert opd.ids == ("w0", "w1", "w2") and opd.seconds == 100.0 and gated.seconds == 250.0
        assert opd.tokens == (11, 12, 13) and opd.step_seconds == (2.0, 2.0, 2.0)
        assert opd.correct_TxVxN[:, 0].tolist() == [[0, 0, 0], [1, 0, 0]]
        assert opd.correct_TxVxN[:, 1].tolist() == [[1, 1, 0], [1, 0, 0]]
        assert opd.answer_TxVxN[1, 0].tolist() == ["a0", None, "no"]
        assert opd.answer_TxVxN[1, 1].tolist() == ["a0", "a1 a1", "no"]
        assert opd.truncated_TxVxN[1, 0].tolist() == [False, True, False]
        assert opd.length_TxVxN[:, 0].tolist() == [[4] * 3] * 2 and opd.length_TxVxN[:, 1].tolist() == [[3] * 3] * 2
        assert opd.divergence_TxVxN[0, 1].tolist() == [0.5] * 3 and np.isnan(opd.divergence_TxVxN[:, 0]).all()
        assert opd.expected_VxN[1].tolist() == ["a0", "a1", "a2"]
        assert gated.steps == (5,) and gated.correct_TxVxN[0, 4].tolist() == [0, 0, 0]
        assert gated.correct_TxVxN[0, 0].tolist() == [0, 1, 1]


def test_runs_that_are_not_finished_or_no_points_of_the_grid_are_left_out(study):
    (study / "setting=t,ablation=opd,seed=0" / "summary.txt").unlink()
    write_run(study, "t", "x", 1, {5: {"with_context": "1"}}).rename(study / "seed=1")
    assert [run.method for run in collect(epath.Path(study))] == ["gated"]
    with pytest.raises(UserError, match="no finished run"):
        collect(epath.Path(study / "seed=1"))


def test_an_evaluation_that_lacks_an_item_is_refused(study):
    path = study / "setting=t,ablation=opd,seed=0" / "evaluations" / "step_00000005.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(UserError, match="not of the same items"):
        collect(epath.Path(study))


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK and no archive")
    with pytest.raises(UserError, match="does not hold the items"):
        load(epath.Path(tmp_path / "x.npz"))
