"""Lines are written whole, and come back as they were."""

import dataclasses

import pytest
from etils import epath

from nca_jax.errors import UserError
from nca_jax.items import GameResult, ItemResult, read_items, write_items


def item(**changes) -> ItemResult:
    values = {"view": "no_context", "prompt": "0", "response": "r", "answer": None, "correct": True, "length": 2}
    return ItemResult(**{"id": "item 0", "truncated": False, **values, **changes})


def test_one_line_an_item_and_view_and_nothing_else_is_left(tmp_path):
    path = epath.Path(tmp_path) / "evaluations" / "step.jsonl"
    game = GameResult(**dataclasses.asdict(item(view="with_context", divergence=0.25)), turns=[{"number": 1}])
    items = [item(), item(response="né\u2028\n", expected="x", group="g", sample=3), game]
    write_items(path, items)
    assert [other.name for other in path.parent.iterdir()] == ["step.jsonl"]
    assert path.read_text().count("\n") == 3
    assert read_items(path) == [dataclasses.asdict(one) for one in items]


@pytest.mark.parametrize("text", ['{"id": 1}\n', "[1]\n", "no json\n"])
def test_other_files_are_refused(tmp_path, text):
    path = epath.Path(tmp_path) / "items.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"items\.jsonl does not hold item lines"):
        read_items(path)
    with pytest.raises(UserError, match=r"nothing\.jsonl does not hold item lines"):
        read_items(epath.Path(tmp_path) / "nothing.jsonl")
