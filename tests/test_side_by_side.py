"""The comparison with the peers: its arithmetic, its processes, and that every side gets the same tokens."""

import hashlib
import sys

import numpy as np
import pytest

from benchmarks import side_by_side
from benchmarks.peers import inputs, worker
from benchmarks.peers.ours import batch_digest, make_batch

# A side that prints where answers go, fails on request, and ends without an answer.
SIDE = """
import os, sys
from benchmarks.peers.worker import serve
def add(a, b):
    print("noise", flush=True)
    return {"sum": a + b}
def fail():
    raise ValueError("no such thing")
def about():
    return {"threads": os.environ["OMP_NUM_THREADS"]}
serve({"about": about, "add": add, "fail": fail, "end": lambda: sys.exit(3)})
"""


def answers(*seconds, peak=7):
    return [{"seconds": s, "peak_mb": peak} for s in seconds]


def test_ratios_are_medians_of_repetitions_and_not_ratios_of_medians():
    # Without the first: 4/1, 3/3, 10/2, whose median is 4; the ratio of the medians would be 4 / 2 = 2.
    row = side_by_side.compared({"ours": answers(50.0, 1.0, 3.0, 2.0), "trl": answers(4.0, 3.0, 10.0, peak=9)}, 3)
    assert row["times faster"] == {"trl": 4.0}
    assert row["median seconds"] == {"ours": 2.0, "trl": 4.0}
    assert row["first seconds, compilation included"] == {"ours": 50.0}
    assert row["peak MB"] == {"ours": 7, "trl": 9}


@pytest.mark.parametrize(("theirs", "agree"), [(2.00009, True), (2.0002, False)])
def test_the_first_losses_have_to_agree_and_the_later_ones_are_told(theirs, agree):
    found = side_by_side.agreement({"ours": [2.0, 1.5, 1.0], "trl": [theirs, 1.75]})
    assert found["losses agree"] is agree
    assert found["difference of the first losses"] == pytest.approx(theirs - 2.0)
    assert found["largest difference"] == pytest.approx(0.25)  # the third step has one side only


def test_sides_that_were_fed_different_tokens_are_not_compared():
    assert side_by_side.same_tokens([{"digest": "a"}, {"digest": "a", "fed": ""}, {"fed": "a"}]) == "a"
    with pytest.raises(RuntimeError, match="different tokens"):
        side_by_side.same_tokens([{"digest": "a"}, {"digest": "a", "fed": "b"}])


class Recorded:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def ask(self, do, **arguments):
        self.log.append(self.name)
        return {"i": self.log.count(self.name), **arguments}


def test_sides_take_turns_and_a_warm_one_is_not_warmed_up_again():
    log = []
    sides = [Recorded("ours", log), Recorded("trl", log)]
    found = side_by_side.in_turn(sides, 2, "step", {"trl"}, temperature=0.5)
    assert log == ["ours", "ours", "trl", "trl", "ours"]
    assert [a["i"] for a in found["ours"]] == [1, 2, 3] and [a["i"] for a in found["trl"]] == [1, 2]
    assert found["trl"][0]["temperature"] == 0.5


def test_a_row_that_is_measured_again_replaces_the_old_one():
    step = {"part": "step", "model": "m", "objective": "nca", "rollout": False}
    rows = [step | {"context": 2048, "x": 1}, step | {"context": 64, "x": 1}]
    rows = side_by_side.merged(rows, step | {"context": 512, "x": 1})
    rows = side_by_side.merged(rows, step | {"context": 64, "x": 2})
    rows = side_by_side.merged(rows, step | {"context": 64, "rollout": True, "x": 3})
    assert [(row["context"], row["rollout"], row["x"]) for row in rows] == [
        (64, False, 2),
        (64, True, 3),
        (512, False, 1),
        (2048, False, 1),
    ]


def test_the_table_has_a_line_for_every_side_compared_with():
    sampling = {
        "part": "sampling",
        "model": "m",
        "batch": 8,
        "times faster": {"trl": 2.5, "tunix": 1.25},
        "median seconds": {"ours": 2.0, "trl": 5.0, "tunix": 2.5},
        "peak MB": {"ours": 10, "trl": 20, "tunix": 30},
    }
    step = sampling | {"part": "step", "objective": "nca", "rollout": True, "context": 64}
    compiled = {"part": "compilations", "model": "m", "compilations": {"ours": [9, 0]}}
    lines = side_by_side.table(
        {"rows": [sampling, step | {"difference of the first losses": 2e-7, "busy": True}, compiled]}
    ).split("\n")
    assert "| sampling, m |  | 8 | trl | 2.5 | 2.0 | 5.0 | 10 | 20 |  |" in lines
    assert "| sampling, m |  | 8 | tunix | 1.25 | 2.0 | 2.5 | 10 | 30 |  |" in lines
    assert (
        "| NCA step with rollout, m (on a busy machine) | 64 | 8 | trl | 2.5 | 2.0 | 5.0 | 10 | 20 | 2.0e-07 |" in lines
    )
    assert lines[0].count("|") == lines[2].count("|")
    assert "[9, 0]" in lines[-1]


def test_a_process_answers_whatever_it_prints_and_says_what_failed():
    side = side_by_side.Side("peer", [sys.executable, "-c", SIDE], {"OMP_NUM_THREADS": "2"})
    assert side.about == {"threads": "2"}
    assert side.ask("add", a=2, b=3) == {"sum": 5}
    with pytest.raises(RuntimeError, match=r"(?s)peer: 'fail' failed.*no such thing"):
        side.ask("fail")
    assert side.ask("add", a=1, b=1) == {"sum": 2}  # it goes on after that
    with pytest.raises(RuntimeError, match="ended with code 3"):
        side.ask("end")
    side.close()


def test_inputs_come_back_from_the_file_and_keep_what_they_promise(tmp_path):
    made = inputs.make_inputs(vocab_size=259, batch=32, context=64, response=5)
    inputs.save(tmp_path / "inputs.npz", made)
    read = inputs.load_inputs(tmp_path / "inputs.npz")
    for one, other in zip(made, read, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype == np.int32
    assert made.context_C.shape == (64,) and made.response_BxR.shape == (32, 5)
    assert made.prompt_length_B.max() == 32 and made.prompt_length_B.min() >= 16
    assert len(set(made.prompt_length_B.tolist())) > 4
    assert min(x.min() for x in (made.header_C, made.context_C, made.response_BxR)) >= 3  # no special tokens
    assert (made.prompt_BxP == 0).sum() == (32 - made.prompt_length_B).sum()
    positions = inputs.make_positions(6, 4, 11)
    inputs.save(tmp_path / "positions.npz", positions)
    np.testing.assert_array_equal(inputs.load_positions(tmp_path / "positions.npz").head_VxD, positions.head_VxD)


SMALL = inputs.Inputs(
    header_C=np.array([3, 4], np.int32),
    context_C=np.array([5, 6, 7], np.int32),
    prompt_BxP=np.array([[8, 9], [10, 0]], np.int32),
    prompt_length_B=np.array([2, 1], np.int32),
    response_BxR=np.array([[11, 12], [13, 14]], np.int32),
)


def test_prompts_are_header_or_context_and_the_prompt_without_padding():
    assert inputs.prompts(SMALL, False) == [[3, 4, 8, 9], [3, 4, 10]]
    assert inputs.prompts(SMALL, True) == [[5, 6, 7, 8, 9], [5, 6, 7, 10]]
    assert inputs.prompts(SMALL, True, 1) == [[5, 6, 7, 8, 9]]


def test_our_batch_has_the_tokens_of_the_rows_that_the_peers_are_given():
    rows = [[3, 4, 8, 9], [3, 4, 10], [5, 6, 7, 8, 9], [5, 6, 7, 10], [11, 12], [13, 14]]
    flat = [number for row in rows for number in (len(row), *row)]
    by_hand = hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in flat)).hexdigest()[:16]
    assert batch_digest(make_batch(SMALL)) == inputs.digest(rows) == by_hand


@pytest.mark.parametrize("field", ["header_C", "context_C", "prompt_BxP", "prompt_length_B", "response_BxR"])
def test_the_digest_of_our_batch_sees_every_input(field):
    changed = np.array(getattr(SMALL, field))
    changed.flat[0] -= 1
    assert batch_digest(make_batch(SMALL._replace(**{field: changed}))) != batch_digest(make_batch(SMALL))


def test_the_digest_sees_where_rows_end():
    assert inputs.digest([[1, 2], [3]]) != inputs.digest([[1], [2, 3]])


def test_peak_memory_counts_what_was_held_for_a_moment_only():
    worker.reset_peak()
    before = worker.peak_mb()
    held = np.ones(40_000_000)  # 320 MB
    del held
    assert 300 <= worker.peak_mb() - before <= 400
