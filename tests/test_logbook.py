"""What is on disk after a restart, and what is shown on the way."""

import json
import struct

import numpy as np
import pytest
from etils import epath
from tensorboardX.proto import event_pb2

from nca_jax import logbook
from nca_jax.logbook import Logbook


def lines(workdir, name: str) -> list[dict]:
    return [json.loads(line) for line in (workdir / f"{name}.jsonl").read_bytes().decode().split("\n")[:-1]]


def reopen(workdir, continued_from: int | None) -> Logbook:
    return Logbook(epath.Path(workdir), continued_from, total_steps=6)


def write_run(workdir) -> None:
    """A run of four steps, with an evaluation at 0 and 2 and samples at 2 and 4."""
    book = reopen(workdir, None)
    book.metrics(0, {"eval/harm": 0.0})
    for step in range(1, 5):
        book.metrics(step, {"loss": step / 10})
        if step % 2 == 0:
            book.samples(step, [{"prompt": "cow", "no_context": "kühe"}, {"prompt": "ox", "no_context": "oxen"}])
        if step == 2:
            book.metrics(step, {"eval/harm": 0.5})
    book.close()


@pytest.fixture
def workdir(tmp_path):
    write_run(tmp_path)
    return tmp_path


def test_records_are_one_line_each(workdir):
    assert [record["step"] for record in lines(workdir, "metrics")] == [0, 1, 2, 2, 3, 4]
    assert lines(workdir, "metrics")[2] == {"step": 2, "loss": 0.2}
    assert lines(workdir, "samples")[0] == {"step": 2, "prompt": "cow", "no_context": "kühe"}
    assert any((workdir / "tensorboard").iterdir())


def test_a_restart_drops_what_came_after_its_step_and_goes_on(workdir):
    book = reopen(workdir, 2)
    assert [record["step"] for record in lines(workdir, "metrics")] == [0, 1, 2, 2]
    assert [record["step"] for record in lines(workdir, "samples")] == [2, 2]
    book.metrics(3, {"loss": 7.0})
    assert lines(workdir, "metrics")[-1] == {"step": 3, "loss": 7.0}
    assert not list(workdir.glob("*.tmp"))


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(workdir):
    """Its evaluation at step 0 must not stand there twice."""
    book = reopen(workdir, None)
    assert not lines(workdir, "metrics") and not lines(workdir, "samples")
    book.metrics(0, {"eval/harm": 0.25})
    assert lines(workdir, "metrics") == [{"step": 0, "eval/harm": 0.25}]


def test_a_restart_at_the_last_step_keeps_every_record(workdir):
    before = (workdir / "metrics.jsonl").read_bytes()
    reopen(workdir, 4)
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4, "loss": 0.5}', "{"])
def test_a_last_line_that_was_left_unfinished_is_dropped(torn, workdir):
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(torn)
    reopen(workdir, 4)
    assert [record["step"] for record in lines(workdir, "metrics")] == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\r", "\x1e"])
def test_line_separators_in_a_model_text_do_not_end_its_record(separator, workdir):
    book = reopen(workdir, 4)
    book.samples(5, [{"no_context": f"a{separator}b"}, {"no_context": "next"}])
    reopen(workdir, 5)
    assert [record["no_context"] for record in lines(workdir, "samples")[-2:]] == [f"a{separator}b", "next"]


def test_last_evaluation_is_the_newest_record_that_holds_one(workdir):
    assert reopen(workdir, 4).last_evaluation() == {"step": 2, "eval/harm": 0.5}
    assert reopen(workdir, 1).last_evaluation() == {"step": 0, "eval/harm": 0.0}


def test_progress_shows_step_losses_speed_and_time_left(workdir, capsys):
    values = {"loss": 0.25, "opd": 0.125, "nca": 1 / 3, "grad_norm": 9.0}
    reopen(workdir, 4).progress(5, values, tokens_per_second=1234.5, seconds_left=125.9)
    shown = capsys.readouterr()
    assert shown.err == "step 5/6 loss 0.2500 opd 0.1250 nca 0.3333 1234 tokens/s 2:05 left\n"
    assert shown.out == ""


def test_say_writes_one_line_to_stderr(workdir, capsys):
    reopen(workdir, 4).say("evaluation at step 4")
    assert capsys.readouterr() == ("", "evaluation at step 4\n")


def test_where_nothing_is_to_be_written_nothing_is(tmp_path, capsys):
    book = Logbook(epath.Path(tmp_path / "run"), 1, total_steps=6, writes=False)
    book.metrics(2, {"eval/harm": 0.5})
    book.samples(2, [{"prompt": "cow"}])
    book.progress(2, {"loss": 1.0, "opd": 1.0, "nca": 1.0}, 1.0, 1.0)
    book.say("evaluation at step 2")
    assert book.last_evaluation() == {}
    book.flush()
    book.close()
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that the logbook reads; a write to the bucket takes the second number of them."""
    now = [1000.0, 0.0]

    def write(path, text):
        now[0] += now[1]
        path.write_text(text)

    monkeypatch.setattr(logbook.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(logbook, "write_text", write)
    return now


def steps(workdir, name: str = "metrics") -> list[int]:
    return [record["step"] for record in lines(workdir, name)] if (workdir / f"{name}.jsonl").exists() else []


def test_in_a_bucket_records_come_with_a_flush_and_at_the_end(bucket):
    workdir = epath.Path(bucket) / "run"
    book = reopen(workdir, None)
    book.metrics(1, {"loss": 0.5})
    assert steps(workdir) == []
    book.flush()
    assert steps(workdir) == [1] and not (workdir / "samples.jsonl").exists()
    assert b"loss" in next((workdir / "tensorboard").iterdir()).read_bytes()
    book.metrics(2, {"loss": 0.25, "eval/harm": 0.5})
    book.samples(2, [{"prompt": "ox\u2028"}, {"prompt": "cow"}])
    assert steps(workdir) == [1] and book.last_evaluation() == {"step": 2, "loss": 0.25, "eval/harm": 0.5}
    book.close()
    assert lines(workdir, "metrics")[1] == {"step": 2, "loss": 0.25, "eval/harm": 0.5}
    assert lines(workdir, "samples") == [{"step": 2, "prompt": "ox\u2028"}, {"step": 2, "prompt": "cow"}]
    events = [path.read_bytes() for path in (workdir / "tensorboard").iterdir()]
    assert sorted((content.count(b"loss"), content.count(b"eval/harm")) for content in events) == [(1, 0), (1, 1)]


def test_a_run_in_a_bucket_is_continued(bucket):
    workdir = epath.Path(bucket) / "run"
    write_run(workdir)
    assert steps(workdir) == [0, 1, 2, 2, 3, 4] and steps(workdir, "samples") == [2, 2, 4, 4]
    book = reopen(workdir, 2)
    assert steps(workdir) == [0, 1, 2, 2] and steps(workdir, "samples") == [2, 2]
    assert book.last_evaluation() == {"step": 2, "eval/harm": 0.5}
    book.metrics(3, {"loss": 7.0})
    book.close()
    assert steps(workdir) == [0, 1, 2, 2, 3] and steps(workdir, "samples") == [2, 2]
    assert reopen(workdir, None) and steps(workdir) == steps(workdir, "samples") == []
    names = {path.name for path in workdir.iterdir()}
    assert names == {"metrics.jsonl", "samples.jsonl", "tensorboard"}


def test_in_a_bucket_records_are_written_every_few_seconds(bucket, clock):
    workdir = epath.Path(bucket) / "run"
    book = reopen(workdir, None)
    for step, at, written in ((1, 1009, []), (2, 1010, [1, 2]), (3, 1019, [1, 2]), (4, 1021, [1, 2, 3, 4])):
        clock[0] = at
        book.metrics(step, {"loss": 1.0})
        assert steps(workdir) == written


def test_a_slow_bucket_is_written_to_a_twentieth_of_the_time(bucket, clock):
    workdir = epath.Path(bucket) / "run"
    book = reopen(workdir, None)
    clock[:] = 1010, 3.0
    book.metrics(1, {"loss": 1.0})
    for step, at, last in ((2, 1072, 1), (3, 1073, 3)):  # written until 1013, and then not for 60 s
        clock[0] = at
        book.metrics(step, {"loss": 1.0})
        assert steps(workdir)[-1] == last


def test_samples_are_texts_and_figures_pictures_on_tensorboard(tmp_path):
    book = reopen(tmp_path, None)
    book.samples(2, [{"prompt": "# cow", "no_context": "two\n| cows"}])
    book.images(2, {"figures/harm": np.full((4, 6, 4), 255, np.uint8)})
    book.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    values = {}
    for record in _records(events):
        event = event_pb2.Event.FromString(record)
        values |= {value.tag: (event.step, value) for value in event.summary.value}
    step, text = values["samples/0/text_summary"]
    assert step == 2
    # Indented: in Markdown a block in which nothing is markup.
    assert text.tensor.string_val[0].decode() == "**prompt**\n\n    # cow\n\n**no_context**\n\n    two\n    | cows"
    step, picture = values["figures/harm"]
    assert (step, picture.image.height, picture.image.width) == (2, 4, 6)


def _records(path):
    """The records of a file: a length, its checksum, the bytes, their checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[12 + length + 4 :]


def test_another_log_gets_the_same(tmp_path):
    class Other:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            return lambda *arguments: self.calls.append((name, *arguments))

    other = Other()
    book = Logbook(epath.Path(tmp_path), None, 6, others=[other])
    picture = {"figures/harm": np.zeros((1, 1, 4), np.uint8)}
    book.metrics(1, {"loss": 0.5})
    book.samples(1, [{"prompt": "cow"}])
    book.images(1, picture)
    book.close()
    assert other.calls == [
        ("metrics", 1, {"loss": 0.5}),
        ("samples", 1, [{"prompt": "cow"}]),
        ("images", 1, picture),
        ("close",),
    ]
    silent = Logbook(epath.Path(tmp_path), None, 6, writes=False, others=[other])
    silent.metrics(2, {"loss": 0.25})
    silent.images(2, picture)
    silent.samples(2, [{"prompt": "cow"}])
    silent.close()
    assert len(other.calls) == 4
