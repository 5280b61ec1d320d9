"""The tables of a study, of made-up item lines with known answers."""

import json

import pytest
from study_runs import write_run
from test_study_statistics import BEFORE, GATED, OPD, SECOND

from nca_jax.study_tables import main

PAGE = """# A page
<!-- tables of nca_jax.study_tables: begin -->
old
<!-- tables of nca_jax.study_tables: end -->
its end
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("study")
    for task in ("a", "b"):
        for seed, by_step in ((0, OPD), (1, SECOND)):
            write_run(workdir, task, "opd", seed, by_step, seconds=1800.0)
            write_run(workdir, task, "gated", seed, GATED, seconds=5400.0)
    write_run(workdir, "a", "gated_1.0", 0, GATED, seconds=0.0)
    page = workdir / "page.md"
    page.write_text(PAGE)
    assert main([str(workdir), f"--page={page}"]) == 0
    return workdir


def rows_of(text: str, first: str) -> list[list[str]]:
    """Rows of all tables that begin with that cell."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first]


def test_tables_say_what_was_counted(study):
    text = (study / "tables" / "study.md").read_text()
    # 4 x 0.5 and 4 x 1.5 hours, and one that took none.
    assert "9 runs, 8.0 hours." in text and "### `a`, 10 items" in text and "### `b`, 10 items" in text
    assert "Before training: no context 0.0, with context 80.0, paraphrased 80.0" in text
    end, more, spent = rows_of(text.split("### `b`")[0], "`opd`")
    values = [cell.split(" ")[0] for cell in end[1:]]
    # Steps 12 and 15; without .9 and .7; with .7 and .7; lowest .3; harm 2/9 and 0; peaks .5; both .7; followed .5, 0.
    assert values == ["13.5", "80.0", "70.0", "30.0", "11.1", "50.0", "70.0", "25.0"]
    assert [cell.split(" ")[0] for cell in more[1:]] == ["15.0", "70.0", "70.0", "10.0", "5.0", "-25.0", "0.500"]
    assert spent[1:] == ["0, 1", "36", "2.0", "1800"]
    assert "(" in end[2] and " to " in end[2]


def test_comparisons_are_tested_over_pairs_of_runs(study):
    text = (study / "tables" / "study.md").read_text()
    assert "`gated` - `opd`" in text and "`gated` - `nca_0.5`" not in text  # that one was not run
    harm = next(row for row in rows_of(text, "`gated` - `opd`") if row[1] == "harm")
    # Seed 0 loses 2/9, seed 1 nothing, in both tasks: of 16 changes of sign, the two ties double what is as far.
    assert harm[4].split(" ")[0] == "-11.1" and harm[5:7] == ["4", "0.500"]
    other = next(row for row in rows_of(text, "`gated` - `opd`") if row[1] == "irrelevant followed")
    assert other[4].split(" ")[0] == "+65.0" and other[6] == "0.125" and other[7] == "0.500"


def test_results_hold_runs_curves_and_times(study):
    found = json.loads((study / "tables" / "study.json").read_text())
    opd = found["tasks"]["a"]["methods"]["opd"]
    assert opd["steps"] == [0, 5, 10, 15] and opd["seeds"] == [0, 1]
    assert opd["end"]["no_context"]["runs"] == {"0": 0.9, "1": 0.7}
    assert [point["value"] for point in opd["curves"]["no_context"]] == pytest.approx([0.0, 0.2, 0.6, 0.8])
    assert opd["curves"]["harm"][0]["value"] is None
    assert {row["quantity"] for row in found["primary"]} == {
        "steps_to_0.9_of_context",
        "harm",
        "peak_harm",
        "other_task",
    }


def test_the_items_alone_give_the_same(study, tmp_path):
    items = study / "tables" / "study_items.npz"
    assert main([f"--items={items}", f"--output={tmp_path}"]) == 0
    for name in ("study.json", "study.md", "study_harm.png"):
        assert (tmp_path / name).read_bytes() == (study / "tables" / name).read_bytes()


def test_a_grid_that_was_run_in_parts_is_put_together(study, tmp_path, capsys):
    """Seed 1 of `b` in another workdir, `a` as items: the same as all in one; of what is in both, the first counts."""
    for task in ("a", "b"):
        write_run(tmp_path / "first", task, "opd", 0, OPD, seconds=1800.0)
        write_run(tmp_path / "first", task, "gated", 0, GATED, seconds=5400.0)
    write_run(tmp_path / "second", "b", "opd", 1, SECOND, seconds=1800.0)
    write_run(tmp_path / "second", "b", "gated", 1, GATED, seconds=5400.0)
    write_run(tmp_path / "second", "b", "opd", 0, SECOND, seconds=1.0)  # not this one
    write_run(tmp_path / "third", "a", "opd", 1, SECOND, seconds=1800.0)
    write_run(tmp_path / "third", "a", "gated", 1, GATED, seconds=5400.0)
    write_run(tmp_path / "third", "a", "opd", 0, SECOND, seconds=1.0)  # nor this one
    write_run(tmp_path / "third", "a", "gated_1.0", 0, GATED, seconds=0.0)
    assert main([str(tmp_path / "third")]) == 0
    parts = [str(tmp_path / "first"), str(tmp_path / "second"), f"--items={tmp_path}/third/tables/study_items.npz"]
    assert main([*parts, f"--output={tmp_path}/all"]) == 0
    for name in ("study_items.npz", "study.json", "study.md"):
        assert (tmp_path / "all" / name).read_bytes() == (study / "tables" / name).read_bytes()
    assert main(parts) == 2
    assert "--output=DIR" in capsys.readouterr().err


def test_some_runs_of_a_study_have_tables_of_their_own(study, tmp_path, capsys):
    items = study / "tables" / "study_items.npz"
    wanted = ["--only=setting=a,ablation=opd,*", "--only=*gated_1.0*"]
    assert main([f"--items={items}", *wanted, f"--output={tmp_path}/some"]) == 0
    found = json.loads((tmp_path / "some" / "study.json").read_text())
    methods = found["tasks"]["a"]["methods"]
    assert {method: of["seeds"] for method, of in methods.items()} == {"opd": [0, 1], "gated_1.0": [0]}
    assert list(found["tasks"]) == ["a"] and found["primary"] == []
    # Of all runs that were there before nothing is lost.
    whole = items.read_bytes()
    assert main([f"--items={items}", *wanted]) == 2 and items.read_bytes() == whole
    assert "give another --output" in capsys.readouterr().err
    assert main([f"--items={items}", "--only=*seed=7", f"--output={tmp_path}/none"]) == 2
    assert "--only=*seed=7 matches no run" in capsys.readouterr().err


def test_the_page_keeps_what_is_around_the_tables(study):
    text = (study / "page.md").read_text()
    assert text.startswith("# A page\n") and text.endswith("end -->\nits end\n") and "old" not in text
    assert "9 runs" in text and "(tables/study_harm.png)" in text and "(tables/study_harm_others.png)" in text


def test_a_page_without_a_place_and_a_study_without_a_start_are_said(study, tmp_path, capsys):
    (tmp_path / "page.md").write_text("# Nothing\n")
    items = study / "tables" / "study_items.npz"
    assert main([f"--items={items}", f"--output={tmp_path}", f"--page={tmp_path}/page.md"]) == 2
    assert "no place for the tables" in capsys.readouterr().err
    write_run(tmp_path / "s", "a", "gated", 0, GATED)
    assert main([str(tmp_path / "s")]) == 2
    assert "before training" in capsys.readouterr().err
    assert main([]) == 2


def test_runs_of_different_grids_are_said(tmp_path, capsys):
    write_run(tmp_path, "a", "opd", 0, OPD)
    write_run(tmp_path, "a", "gated", 0, {7: BEFORE})
    assert main([str(tmp_path)]) == 2
    assert "not evaluated alike" in capsys.readouterr().err
