"""The data of the page's item browser: what each item of the last evaluations was answered, in every view."""

import collections
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nca_jax.figures import shown
from nca_jax.items import NO_CONTEXT, OTHER_TASK, WITH_CONTEXT
from nca_jax.page.sources import Source

# A browser opens a page of so many items and characters at once, also on a phone.
MOST_ITEMS, MOST_CHARACTERS = 3000, 8_000_000
_SHOWN = ("response", "answer", "correct", "length", "truncated", "expected", "turns")


def browser_data(sources: Sequence[Source]) -> dict[str, Any]:
    """What page/report.js shows, as JSON takes it.

    Returns:
      "runs", each with its label and its views with a context; "prompts"; "items", each an item of a run with one
      response in each view; "names" of views as they are shown; "left_out": how many items were too many, and how many
      of them the training context had changed. Those that it changed are taken first, then those that another context
      changed.
    """
    entries = []
    for number, source in enumerate(sources):
        ranks = collections.Counter()
        for place, item in enumerate(_items(source)):
            priority = _priority(item["views"])
            ranks[priority] += 1
            entries.append((priority, ranks[priority], number, place, item))
    # The first of every run, then the second of every run: none is crowded out.
    entries.sort(key=lambda entry: entry[:3])
    kept, characters = [], 0
    for entry in entries:
        characters += len(json.dumps(entry[-1], ensure_ascii=False))
        if len(kept) == MOST_ITEMS or (kept and characters > MOST_CHARACTERS):
            break
        kept.append(entry)
    left_out = entries[len(kept) :]
    prompts: dict[str, int] = {}
    items = []
    for _, _, number, _, item in sorted(kept, key=lambda entry: entry[2:4]):
        prompt = prompts.setdefault(item.pop("prompt"), len(prompts))
        items.append({"run": number, "prompt": prompt, **item})
    runs = [
        {
            "label": source.run.label,
            "views": list(dict.fromkeys(l["view"] for l in source.lines if l["view"] != NO_CONTEXT)),
        }
        for source in sources
    ]
    return {
        "runs": runs,
        "names": {view: shown(view) for run in runs for view in [NO_CONTEXT, *run["views"]]},
        "prompts": list(prompts),
        "items": items,
        "left_out": {"all": len(left_out), "changed": sum(priority == 0 for priority, *_ in left_out)},
    }


def as_script(data: Mapping[str, Any]) -> str:
    """JSON for a script element: nothing in it ends the element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _items(source: Source) -> list[dict[str, Any]]:
    """One for each item and sample that was answered without a context."""
    items: dict[tuple[str, int], dict[str, Any]] = {}
    for line in source.lines:
        key = (line["id"], line.get("sample", 0))
        item = items.setdefault(
            key, {"id": line["id"], "sample": key[1], "prompt": line.get("prompt", ""), "views": {}}
        )
        if line.get("group"):
            item["group"] = line["group"]
        item["views"][line["view"]] = {name: line[name] for name in _SHOWN if line.get(name) not in (None, [])}
    return [item for item in items.values() if NO_CONTEXT in item["views"]]


def _priority(views: Mapping[str, Mapping[str, Any]]) -> int:
    """0: the training context changed whether the item is right; 1: another context did; 2: none did."""
    changed = {view for view, found in views.items() if found["correct"] != views[NO_CONTEXT]["correct"]}
    return 0 if WITH_CONTEXT in changed else 1 if changed - {OTHER_TASK} else 2
