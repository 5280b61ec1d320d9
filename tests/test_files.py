"""Model directories that appear complete or not at all, on disks and in buckets."""

import os

import pytest
from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import is_bucket, new_model_directory, read_json, write_json


def fill(path, text="new"):
    (path / "config.json").write_text(text)


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_a_directory_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "deep" / "model"
    with new_model_directory(target) as building:
        fill(building)
        assert not target.exists()
    assert (target / "config.json").read_text() == "new" and names(target.parent) == ["model"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_what_was_there(overwrite, tmp_path):
    target = tmp_path / "model"
    if overwrite:
        target.mkdir()
        fill(target, "old")
    with pytest.raises(ZeroDivisionError), new_model_directory(target, overwrite) as building:
        fill(building)
        raise ZeroDivisionError
    assert names(tmp_path) == (["model"] if overwrite else [])
    assert not overwrite or (target / "config.json").read_text() == "old"


def test_a_model_is_replaced_only_if_told_to(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    fill(target, "old")
    (target / "old.txt").write_text("")
    with pytest.raises(UserError, match="pass --overwrite"), new_model_directory(target) as building:
        fill(building)
    with new_model_directory(target, overwrite=True) as building:
        fill(building)
    assert names(target) == ["config.json"] and names(tmp_path) == ["model"]


@pytest.mark.parametrize("content", ["a directory", "a file"])
def test_what_is_no_model_is_never_replaced(content, tmp_path):
    target = tmp_path / "home"
    if content == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not a model directory"), new_model_directory(target, overwrite=True):
        pass
    assert target.exists()


def test_what_a_killed_process_left_is_cleared(tmp_path):
    left = tmp_path / ".model.partial"
    left.mkdir()
    (left / "junk").write_text("")
    with new_model_directory(tmp_path / "model") as building:
        fill(building)
    assert names(tmp_path / "model") == ["config.json"] and names(tmp_path) == ["model"]


def test_an_empty_directory_may_be_filled(tmp_path):
    with new_model_directory(tmp_path / "model") as building:
        fill(building)
    os.makedirs(tmp_path / "empty")
    with new_model_directory(tmp_path / "empty") as building:
        fill(building)
    assert names(tmp_path / "empty") == ["config.json"]


def test_in_a_bucket_too(bucket):
    target = epath.Path(f"{bucket}/model")
    assert is_bucket(target) and not is_bucket("/gs/model")
    with new_model_directory(target) as building:
        fill(building)
    with pytest.raises(UserError, match="pass --overwrite"), new_model_directory(target):
        pass
    with pytest.raises(ZeroDivisionError), new_model_directory(target, overwrite=True) as building:
        fill(building)
        raise ZeroDivisionError
    assert not (target / "config.json").exists()


def test_json_dictionaries(tmp_path):
    path = epath.Path(tmp_path / "a.json")
    write_json(path, {"ü": [1]})
    assert read_json(path) == {"ü": [1]} and names(tmp_path) == ["a.json"]
    path.write_text("[1]")
    with pytest.raises(UserError, match="not a JSON dictionary but a list"):
        read_json(path)
