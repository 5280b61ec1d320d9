"""The report: what it says of runs that were made by hand (report_runs.py), and what it refuses."""

import base64
import html.parser
import json
import re

import pytest
from etils import epath
from PIL import Image
from report_runs import EVIL, NCA, OPD, games, lines, write_evaluation, write_lines, write_run

from nca_jax import report as command
from nca_jax.errors import UserError
from nca_jax.figures import last_views, step_curves
from nca_jax.page import browser, tables
from nca_jax.page.browser import as_script, browser_data
from nca_jax.page.findings import comparable, find, of_comparison, of_group, reference_and_others
from nca_jax.page.numbers import typeset
from nca_jax.page.render import render
from nca_jax.page.sources import read_sources


class Text(html.parser.HTMLParser):
    """The words of a page, its elements' addresses, and its ids."""

    def __init__(self, page: str):
        super().__init__()
        self.words, self.addresses, self.ids, self.tags = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_data(self, data):
        self.words += data.split()


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """OPD, NCA and an evaluation of games."""
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent / "opd", OPD, 0.0)
    write_run(parent / "nca", NCA, 0.5)
    write_evaluation(parent / "games", games(), "runs/lake", 20, **{"domain.name": "frozenlake"})
    return parent


@pytest.fixture(scope="module")
def findings(workdirs):
    return [find(source) for source in read_sources([str(workdirs / name) for name in ("opd", "nca", "games")])]


@pytest.fixture(scope="module")
def made(workdirs):
    """The page of all three, and the lines that were printed."""
    analysis = workdirs / "opd" / "analysis"
    analysis.mkdir()
    Image.new("RGB", (3, 2), "red").save(analysis / "updates.png")
    texts = {"name": "updates", "title": "Where weights <moved>", "sentence": "Mostly in shallow layers & k."}
    study = {"studies": [texts | {"figure": "updates.png", "csv": "updates.csv"}]}
    (analysis / "analysis.json").write_text(json.dumps(study))
    printed = command.report([str(workdirs / name) for name in ("opd", "nca", "games")])
    return (workdirs / "opd" / "report" / "index.html").read_text(), printed


def row(table, *first):
    """The texts of the row that begins so."""
    (found,) = [cells for cells in table.rows if [cell.text for cell in cells[: len(first)]] == list(first)]
    return dict(zip([column.heading for column in table.columns], found, strict=True))


def test_what_each_context_changes(findings):
    table = tables.pairs_table(findings)
    opd = row(table, "opd", "with context")
    # 12 - 20 of 24; 8 harmed and none helped: McNemar's exact p is 2 / 2 ** 8.
    assert opd["Difference, points"].text == "-33.3" and opd["Regime"].text == "A"
    assert opd["Harm"].text == "40.0 %" and opd["Harm"].interval.startswith("8/20, ")
    # None of 4: Clopper-Pearson's upper bound is 1 - 0.025 ** (1 / 4) = 0.602.
    assert opd["Help"] == ("0.0 %", "0/4, 0.0 to 60.2")
    assert opd["Right in both"].text == "50.0 %" and opd["p"].text == "0.008"
    assert opd["Length change, %"] == ("+20.0", "")  # 12 for 10 tokens in every item
    # 1 harmed and 3 helped: 2 * (1 + 4) / 2 ** 4.
    nca = row(table, "nca_gated", "with context")
    assert (nca["Regime"].text, nca["p"].text, nca["Difference, points"].text) == ("C", "0.625", "+8.3")
    assert nca["Harm"].interval.startswith("1/20, ") and nca["Help"].interval.startswith("3/4, ")
    # Another task's context has answers of its own: it does no harm.
    assert {cells[1].text for cells in table.rows} == {"with context", "paraphrased"}


def test_every_view(findings):
    table = tables.views_table(findings)
    other = row(table, "opd", "other task (context following)")
    assert (other["Accuracy"].text, other["At first"].text, other["Items"].text) == ("50.0 %", "100.0 %", "24")
    assert (other["Length, tokens"].text, other["Divergence, nats a token"].text) == ("12.0", "0.250")
    # Nothing of 24 was cut: 1 - 0.025 ** (1 / 24) = 0.142.
    assert other["Cut"] == ("0.0 %", "0.0 to 14.2")
    game = row(table, "lake step 20", "with context")
    assert (game["Accuracy"].text, game["At first"].text, game["Divergence, nats a token"].text) == ("50.0 %", "–", "–")


def test_a_column_of_which_nothing_is_known_is_left_out(findings):
    assert "Divergence, nats a token" not in [column.heading for column in tables.views_table(findings[2:]).columns]


def test_one_beside_the_other(findings):
    part, games_alone = comparable(findings)
    assert len(games_alone) == 1
    reference, others = reference_and_others([[finding] for finding in part])
    assert reference == [findings[0]] and others == [[findings[1]]]
    table = tables.compared_table(reference, others)
    changes = row(table, "nca_gated")
    # 1/20 - 8/20; 22/24 - 12/24; 19/24 - 12/24.
    assert (changes["Harm"].text, changes["Accuracy with"].text) == ("-35.0", "+41.7")
    assert (changes["Accuracy without"].text, changes["Right in both"].text) == ("+0.0", "+29.2")


def test_by_group_answer_and_what_was_answered(findings):
    group = tables.breakdown_table(findings, "group")
    # Anatomy is the first 12, all right without; with the context OPD is wrong on 8 of them.
    opd = row(group, "anatomy", "opd")
    assert [opd[name].text for name in ("Items", "Accuracy without", "Accuracy with", "Harm", "Right in both")] == [
        "12",
        "100.0 %",
        "33.3 %",
        "66.7 %",
        "33.3 %",
    ]
    assert row(tables.breakdown_table(findings, "expected"), "A", "opd")["Items"].text == "6"
    answers = row(tables.answers_table(findings), "nca_gated", "B")
    # With the context question 1 is answered B, and all six whose answer is B are right.
    assert (answers["Right"].text, answers["Given without"].text, answers["Given with"].text) == ("6", "6", "7")


def test_in_words(findings):
    opd = of_group([findings[0]])
    assert (opd.label, opd.verdict) == ("opd", "regime A, giving the context back hurts")
    assert "8 of the 20 items right without it are wrong with it, 40.0 %" in opd.text
    assert "0 of the 4 items wrong without it are right with it, 0.0 % (95 % interval 0.0 to 60.2)" in opd.text
    assert of_group([findings[1]]).verdict == "regime C, no difference shown"


def test_what_the_anchor_did_follows_from_the_interval(findings, tmp_path):
    opd, nca, _ = findings
    lowered = of_comparison([opd], [nca])
    assert lowered.verdict == "the anchor lowered harm" and "which excludes 0" in lowered.text
    assert "Harm changes by -35.0 points (paired 95 % interval -5" in lowered.text
    # The other way round it is not the anchor that is named, for the reference has one.
    raised = of_comparison([nca], [opd])
    assert raised.verdict == "harm is higher" and "+35.0" in raised.text
    same = find(read_sources([str(write_run(tmp_path / "same", OPD, 0.5))])[0])
    shown = of_comparison([opd], [same])
    assert shown.verdict == "no effect of the anchor on harm shown" and "which includes 0" in shown.text
    never_right = find(read_sources([str(write_run(tmp_path / "b", OPD | {"no_context": ("0" * 24,) * 3}, 0.5))])[0])
    assert of_comparison([opd], [never_right]).verdict == "harm cannot be compared"
    assert "Harm: not defined, no response is right without it. Help: 12 of the 24" in of_group([never_right]).text


def test_several_seeds_are_one_method(tmp_path):
    better = OPD | {"with_context": (*OPD["with_context"][:2], "0" * 4 + "1" * 16 + "0" * 4)}
    paths = [
        str(write_run(tmp_path / "a", OPD, 0.0, seed=0)),
        str(write_run(tmp_path / "b", better, 0.0, seed=1)),
        str(write_run(tmp_path / "c", NCA, 0.5, seed=0)),
    ]
    made = [find(source) for source in read_sources(paths)]
    assert [finding.source.run.label for finding in made] == ["opd seed 0", "opd seed 1", "nca_gated"]
    table = tables.seeds_table(comparable(made))
    # 8 and 4 of 20 harmed; t of 1 degree of freedom is 12.706 and the mean's standard error 10: 30 +- 127.06.
    harm = row(table, "opd, 2 seeds", "Harm")
    assert (harm["Mean"].text, harm["Each seed"].text) == ("30.0 %", "40.0 %, 20.0 %")
    assert harm["Over seeds"].text == "-97.1 to 157.1"
    assert tables.seeds_table(comparable(made[2:])) is None
    said = of_group(made[:2])
    assert said.label == "opd, 2 seeds" and "Harm: 30.0 % (95 % interval" in said.text
    # Both seeds of one beside the only one of the other: 1/20 - 12/40.
    assert "Harm changes by -25.0 points" in of_comparison(made[:2], made[2:]).text


def test_runs_are_called_by_what_tells_them_apart(tmp_path):
    def labels(*paths):
        return [source.run.label for source in read_sources([str(path) for path in paths])]

    weak, strong = write_run(tmp_path / "weak", NCA, 0.1), write_run(tmp_path / "strong", NCA, 0.5)
    again = write_run(tmp_path / "again", NCA, 0.5)
    items = lines(OPD, 2)
    base = write_evaluation(tmp_path / "base", items, "models/tiny", None)
    # The run's own config says how it was trained, and not the one that the evaluation was given.
    test = write_evaluation(
        tmp_path / "test", items, str(strong), 4, **{"evaluation.split": "test", "anchor.beta": 0.0}
    )
    moved = write_evaluation(strong / "evaluate_step_4", items, "elsewhere/strong", 4)
    assert labels(weak) == ["nca_gated"]
    assert labels(weak, strong, base) == ["nca_gated anchor.beta=0.1", "nca_gated anchor.beta=0.5", "tiny"]
    assert labels(base, moved) == ["tiny", "nca_gated"]
    assert labels(strong, again) == ["nca_gated (strong)", "nca_gated (again)"]
    assert labels(strong, test) == ["nca_gated evaluation.split=validation", "nca_gated evaluation.split=test"]


def test_the_page_says_it_all(made):
    page, printed = made
    text = Text(page)
    words = " ".join(text.words)
    assert words.count("8 of the 20 items right without it are wrong with it") == 1
    assert "opd: regime A, giving the context back hurts" in words
    assert "the anchor lowered harm" in words and "below 0 is A (hurts)" in words
    assert "These were evaluated on different items, so only runs of the same line are compared." in words
    assert "opd; nca_gated: 24 items of conventions" in words
    # Where it comes from: devices, versions, command, context, config and the files.
    for fact in (
        "8 × TPU v5e, processes: 2",
        "Python 3.11.9, jax 0.10.2",
        "python -m nca_jax.main --config=configs/conventions.py '--workdir=runs/a run'",
        "[system] Answer with a letter & <no> more.",
        "evaluations/ (3 files)",
        '"learning_rate": 5e-05',
        "The edge is slippery.",
    ):
        assert fact in words, fact
    # The inside of the model, found in the workdir.
    assert "Where weights <moved>" in words and "Mostly in shallow layers & k." in words
    assert re.search(r"opd/analysis/updates\.csv", words)
    assert any(line.startswith("opd: regime A") for line in printed)
    assert printed[-1].startswith("3 directories, ") and printed[-1].endswith("opd/report/index.html")


def test_the_page_is_one_file(made, workdirs):
    page, _ = made
    text = Text(page)
    directory = workdirs / "opd" / "report"
    loaded = [address for address in text.addresses if not address.startswith(("#", "data:"))]
    # Links to the figures' files, and nothing else.
    assert len(loaded) > 10 and {(directory / name).suffix for name in loaded} == {".png"}
    assert all((directory / name).exists() for name in loaded)
    assert {path.name for path in directory.iterdir()} == {"index.html", *loaded}
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert len(text.ids) == len(set(text.ids))
    image = next(address for address in text.addresses if address.startswith("data:image/png"))
    assert base64.b64decode(image.partition(",")[2]) == (workdirs / "opd/analysis/updates.png").read_bytes()


def test_what_a_model_wrote_is_no_markup(made):
    page, _ = made
    text = Text(page)
    # The study's figure is the only image; the page's own scripts are the data and the browser.
    assert text.tags.count("img") == 1 and text.tags.count("script") == 2
    assert "<b>" not in page and EVIL not in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    responses = [
        view["response"] for item in json.loads(data)["items"] for view in item["views"].values() if "response" in view
    ]
    assert sum(EVIL in response for response in responses) == 2


def test_the_same_input_gives_the_same_page(workdirs):
    def page():
        sources = read_sources([str(workdirs / name) for name in ("opd", "nca", "games")])
        found = [find(source) for source in sources]
        runs = [source.run for source in sources]
        return render(sources, found, last_views(runs) + step_curves(runs), [])

    assert page() == page()


def test_the_browser_has_what_changed_first(findings, monkeypatch):
    sources = [finding.source for finding in findings[:2]]
    data = browser_data(sources)
    assert len(data["items"]) == 48 and data["left_out"] == {"all": 0, "changed": 0}
    assert len(data["prompts"]) == 24  # the same of both runs
    assert data["runs"][0] == {"label": "opd", "views": ["with_context", "paraphrased", "other_task"]}
    first = data["items"][0]
    assert (first["id"], first["run"], first["group"]) == ("question-1", 0, "anatomy")
    assert first["views"]["no_context"] == {
        "response": "The answer is A.",
        "answer": "A",
        "correct": True,
        "length": 10,
        "truncated": False,
        "expected": "A",
    }
    # The training context changed 8 items of OPD's and 4 of NCA's.
    monkeypatch.setattr(browser, "MOST_ITEMS", 10)
    few = browser_data(sources)
    assert few["left_out"] == {"all": 38, "changed": 2}
    assert [(item["run"], item["id"]) for item in few["items"]] == [
        *((0, f"question-{i}") for i in range(1, 7)),
        *((1, f"question-{i}") for i in (1, 21, 22, 23)),
    ]
    # Then those that only another context changed: NCA's questions 2 to 6, paraphrased.
    monkeypatch.setattr(browser, "MOST_ITEMS", 14)
    more = [item["id"] for item in browser_data(sources)["items"] if item["run"] == 1]
    assert more == [f"question-{i}" for i in (1, 2, 3, 21, 22, 23)]
    monkeypatch.setattr(browser, "MOST_CHARACTERS", 1)
    assert len(browser_data(sources)["items"]) == 1


def test_a_page_says_how_many_items_are_not_in_it(findings, monkeypatch):
    monkeypatch.setattr(browser, "MOST_ITEMS", 5)
    words = " ".join(Text(render([findings[0].source], findings[:1], [], [])).words)
    assert "5 are here, those that a context changed first; 19 more, of which the training context changed 3" in words


def test_data_in_a_page_ends_no_script():
    data = {"text": "</script> <!-- \u2028 ü"}
    text = as_script(data)
    assert "<" not in text and json.loads(text) == data


def test_a_run_that_has_just_begun_and_lines_with_the_least_there_is(tmp_path):
    begun = write_run(tmp_path / "begun", OPD, 0.0)
    for file in (begun / "evaluations").iterdir():
        file.unlink()
    old = write_run(tmp_path / "old", OPD, 0.5)
    for file in (old / "evaluations").iterdir():
        kept = [json.loads(line) for line in file.read_text().splitlines()]
        for line in kept:
            for later in ("expected", "group", "sample", "divergence"):
                del line[later]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    sources = read_sources([str(begun), str(old)])
    words = " ".join(Text(render(sources, [find(sources[1])], [], [])).words)
    assert "Not evaluated yet: opd." in words and "nca_gated: regime A" in words
    assert "other task (context following)" in words


def test_numbers_as_a_page_sets_them():
    assert typeset("-0.5 to +3 %, step-1 of 2026-11") == "−0.5 to +3\N{NO-BREAK SPACE}%, step-1 of 2026-11"


def test_through_a_bucket(bucket, workdirs):
    there = epath.Path(bucket) / "run"
    for name in ("config.json", "context.json", "evaluations/step_00000004.jsonl"):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text((workdirs / "opd" / name).read_text())
    command.report([str(there)])
    assert "regime A" in (there / "report" / "index.html").read_text()
    assert (there / "report" / "views.png").read_bytes().startswith(b"\x89PNG")


def without_partner(path):
    """Drops the last line, whose item is then not in all views."""
    last = path / "evaluations" / "step_00000004.jsonl"
    last.write_text("".join(line + "\n" for line in last.read_text().splitlines()[:-30]))


BROKEN = {
    "is no directory": lambda path: None,
    "holds neither steps in metrics.jsonl nor evaluations nor items.jsonl": lambda path: path.mkdir(),
    "has no config.json": lambda path: (write_run(path, OPD, 0.0) / "config.json").unlink(),
    "is not one of nca_jax": lambda path: (write_run(path, OPD, 0.0) / "config.json").write_text('{"seed": 0}'),
    "is not a list of messages": lambda path: (write_run(path, OPD, 0.0) / "context.json").write_text('{"a": 1}'),
    "does not hold a JSON record a line": lambda path: (write_run(path, OPD, 0.0) / "metrics.jsonl").write_text("x\n"),
    "are incomplete": lambda path: without_partner(write_run(path, OPD, 0.0)),
    "no evaluation.json": lambda path: (write_evaluation(path, games(), "a", 1) / "evaluation.json").unlink(),
    "is not finished": lambda path: (write_evaluation(path, games(), "a", 1) / "summary.json").unlink(),
    "is empty": lambda path: write_evaluation(path, [], "a", 1),
    "evaluation.json is incomplete": lambda path: (
        write_evaluation(path, games(), "a", 1) / "evaluation.json"
    ).write_text('{"config": {}}'),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_what_cannot_be_reported_is_one_line(reason, tmp_path, capsys):
    BROKEN[reason](tmp_path / "run")
    assert command.main([str(tmp_path / "run"), f"--output={tmp_path / 'out'}"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and reason in printed and printed.count("\n") == 1
    assert str(tmp_path / "run") in printed and not (tmp_path / "out").exists()


def test_directories_that_cannot_be_meant(workdirs, tmp_path):
    with pytest.raises(UserError, match="is given twice"):
        command.report([str(workdirs / "opd"), f"{workdirs / 'opd'}/"])
    with pytest.raises(UserError, match=r"has no analysis\.json"):
        command.report([str(workdirs / "opd")], str(tmp_path / "out"), [str(tmp_path)])
    (tmp_path / "analysis.json").write_text(json.dumps({"studies": [{"title": "a", "figure": "gone.png"}]}))
    with pytest.raises(UserError, match=r"a study of .* is incomplete"):
        command.report([str(workdirs / "opd")], str(tmp_path / "out"), [str(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_lines_of_other_items_are_not_compared(findings, tmp_path):
    """The same ids with other right answers are another task."""
    items = [json.loads(json.dumps(vars(item))) for item in lines(NCA, 2)]
    other = write_run(tmp_path / "other", NCA, 0.5)
    changed = [type(lines(NCA, 2)[0])(**(item | {"expected": "Z"})) for item in items]
    write_lines(other / "evaluations" / "step_00000004.jsonl", changed)
    found = find(read_sources([str(other)])[0])
    assert [len(part) for part in comparable([findings[0], found])] == [1, 1]
    assert [len(part) for part in comparable(findings[:2])] == [2]
