"""What a run in wandb's offline mode has kept, read back from its own file."""

import json

import numpy as np
import pytest
from conftest import SHORT_RUN, take_devices
from etils import epath

from configs import conventions
from nca_jax.errors import UserError
from nca_jax.train import train
from nca_jax.wandb_log import WandbLog

wandb = pytest.importorskip("wandb")


def config(**overrides):
    built = conventions.get_config()
    built.update_from_flattened_dict({"log.wandb.project": "nca", "log.wandb.mode": "offline"} | overrides)
    return built


@pytest.fixture
def logged(monkeypatch) -> list[dict]:
    """What every run is given to log, which it does as well."""
    found, real = [], wandb.init

    def init(**kwargs):
        run = real(**kwargs)
        log = run.log
        monkeypatch.setattr(run, "log", lambda values: found.append(values) or log(values))
        return run

    monkeypatch.setattr("wandb.init", init)
    return found


def test_numbers_samples_and_pictures_are_kept_under_one_id(tmp_path, logged):
    workdir, ids = epath.Path(tmp_path), []
    for step in (1, 2):  # stopped and continued
        log = WandbLog(workdir, config())
        log.metrics(step, {"loss": step / 2})
        log.samples(step, [{"prompt": "cow", "no_context": "cows"}])
        log.images(step, {"figures/harm": np.zeros((3, 3, 4), np.uint8)})
        log.close()
        ids.append((workdir / "wandb_id.txt").read_text().strip())
    assert ids[0] == ids[1]
    assert len(list(tmp_path.rglob(f"*-{ids[0]}.wandb"))) == 2, "both have their file, under one id"
    assert [record for record in logged if "loss" in record] == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}]
    tables = [record["samples"] for record in logged if "samples" in record]
    assert [(table.columns, table.data) for table in tables] == [(["prompt", "no_context"], [["cow", "cows"]])] * 2
    assert [set(record) for record in logged[2::3]] == [{"step", "figures/harm"}] * 2
    assert len(list(tmp_path.rglob("media/images/figures/harm*.png"))) == 2


def test_a_run_goes_there_by_config(tiny_model, tmp_path, monkeypatch, logged):
    take_devices(monkeypatch, 1)
    short = SHORT_RUN | {"steps": 2, "evaluation.every": 2, "mesh.fsdp": 1, "model.source": str(tiny_model)}
    train(config(**short | {"log.figures": True, "log.samples_every": 2}), str(tmp_path))
    own = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record for record in logged if "loss" in record or "eval/harm" in record] == own
    assert sum("samples" in record for record in logged) == 1
    drawn = [record["step"] for record in logged if "figures/length" in record]
    assert drawn == [2], "one evaluation alone is no curve"
    assert [record["step"] for record in logged if "figures/views" in record] == [0, 2]


def test_what_wandb_refuses_is_one_line(tmp_path, monkeypatch):
    def refuses(**kwargs):
        raise wandb.errors.UsageError("no api key\nmore")

    monkeypatch.setattr("wandb.init", refuses)
    with pytest.raises(UserError, match=r"wandb cannot start \(no api key\); log in"):
        WandbLog(epath.Path(tmp_path), config())
