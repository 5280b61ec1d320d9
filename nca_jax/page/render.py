"""The report as one HTML page: all that it says is put together here and set by report.html.j2."""

import base64
import hashlib
import json
import shlex
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup
from ml_collections import ConfigDict

import nca_jax
from nca_jax import settings
from nca_jax.figures import BANDS, NamedFigure
from nca_jax.items import WITH_CONTEXT
from nca_jax.page import findings as words
from nca_jax.page import tables
from nca_jax.page.browser import as_script, browser_data
from nca_jax.page.findings import Finding
from nca_jax.page.numbers import UNKNOWN, Cell, typeset
from nca_jax.page.sources import Source, Study, differing
from nca_jax.plotting import inline_svg


def render(
    sources: Sequence[Source], findings: Sequence[Finding], figures: Sequence[NamedFigure], studies: Sequence[Study]
) -> str:
    """The page: the same characters for the same input.

    Args:
      sources: all of them.
      findings: of those that have been evaluated.
      figures: in order; each is beside the page as <name>.png.
      studies: of the inside of the model.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["typeset"] = typeset
    script = "\n" + _resource("report.js")
    parts = words.comparable(findings)
    statements, comparisons = in_words(parts)
    content = {
        "title": _title(sources),
        "version": nca_jax.__version__,
        "style": Markup(_resource("report.css")),
        "script": Markup(script),
        "script_hash": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "compared": _compared(sources, parts),
        "statements": statements,
        "comparisons": comparisons,
        "rule": _rule(findings),
        "tables": _tables(parts),
        "intervals": _intervals(findings),
        "bands": BANDS,
        "figures": [
            {
                "title": figure.title,
                "note": figure.note,
                "file": f"{figure.name}.png",
                "svg": Markup(inline_svg(figure.figure, figure.title)),
            }
            for figure in figures
        ],
        "studies": [study._replace(image=base64.b64encode(study.image).decode()) for study in studies],
        "differences": _differences(sources),
        "descriptions": [_description(source) for source in sources],
        "data": None,
        "left_out": "",
    }
    if findings:
        data = browser_data([finding.source for finding in findings])
        content["data"] = Markup(as_script(data))
        if data["left_out"]["all"]:
            content["left_out"] = (
                f"{len(data['items'])} are here, those that a context changed first; {data['left_out']['all']} more, "
                f"of which the training context changed {data['left_out']['changed']}, are in the files only."
            )
    headings = {"answer": "In words", "tables": "Tables", "figures": "Figures", "inside": "Inside the model"}
    headings |= {"items": "Items", "runs": "Runs"}
    there = {
        "answer": statements,
        "tables": content["tables"],
        "figures": figures,
        "inside": studies,
        "items": findings,
        "runs": True,
    }
    content["sections"] = [(name, heading) for name, heading in headings.items() if there[name]]
    return environment.from_string(_resource("report.html.j2")).render(content)


def in_words(parts: Sequence[Sequence[Finding]]) -> tuple[list[words.Statement], list[words.Statement]]:
    """What is said of each method, and of each beside the reference on the same items."""
    statements, comparisons = [], []
    for part in parts:
        groups = words.groups_of(part)
        statements += filter(None, map(words.of_group, groups))
        paired = [group for group in groups if all(WITH_CONTEXT in finding.pairs for finding in group)]
        if len(paired) > 1:
            reference, others = words.reference_and_others(paired)
            comparisons += [words.of_comparison(reference, other) for other in others]
    return statements, comparisons


def _resource(name: str) -> str:
    return resources.files("nca_jax.page").joinpath(name).read_text(encoding="utf-8")


def _title(sources: Sequence[Source]) -> str:
    """What is compared, and on which task."""
    labels = list(dict.fromkeys(source.run.method for source in sources))
    tasks = list(dict.fromkeys(source.run.config["domain"]["name"] for source in sources))
    shown = " beside ".join(labels) if len(labels) <= 3 else f"{len(labels)} methods"
    return f"{shown}: {', '.join(tasks)}"


def _compared(sources: Sequence[Source], parts: Sequence[Sequence[Finding]]) -> list[str]:
    """Sentences about what was compared on what."""
    sentences = []
    for part in parts:
        labels = "; ".join(words.label_of(group) for group in words.groups_of(part))
        views = part[0].summary["views"]
        items = next(iter(views.values()))["items"]
        config = part[0].source.run.config
        arguments = ", ".join(f"{name} {value}" for name, value in config["domain"]["settings"].items())
        task = f"{config['domain']['name']} ({arguments})" if arguments else config["domain"]["name"]
        sentences.append(f"{labels}: {items} items of {task}.")
    if len(parts) > 1:
        sentences.append("These were evaluated on different items, so only runs of the same line are compared.")
    if models := list(dict.fromkeys(s.run.config["model"]["source"] for s in sources if s.is_trained)):
        sentences.append(f"Model before training: {', '.join(models)}.")
    if waiting := [source.run.label for source in sources if not source.lines]:
        sentences.append(f"Not evaluated yet: {', '.join(waiting)}.")
    return sentences


def _rule(findings: Sequence[Finding]) -> str:
    """The rule behind the regimes."""
    rules = (finding.pairs[WITH_CONTEXT]["regime"]["rule"] for finding in findings if WITH_CONTEXT in finding.pairs)
    rule = next(rules, "")
    return f"Rule of the regimes: {rule}." if rule else ""


def _tables(parts: Sequence[Sequence[Finding]]) -> list[tables.Table]:
    findings = [finding for part in parts for finding in part]
    if not findings:
        return []
    made = [tables.pairs_table(findings)]
    for part in parts:
        groups = [g for g in words.groups_of(part) if all(WITH_CONTEXT in finding.pairs for finding in g)]
        if len(groups) > 1:
            made.append(tables.compared_table(*words.reference_and_others(groups)))
    made += [tables.seeds_table(parts), tables.views_table(findings)]
    made += [tables.breakdown_table(findings, by) for by in ("group", "expected")]
    made.append(tables.answers_table(findings))
    return [table for table in made if table and table.rows]


def _intervals(findings: Sequence[Finding]) -> str:
    """How the intervals of the tables were made."""
    methods = dict.fromkeys(
        estimate["method"]
        for finding in findings
        for group in ("views", "pairs")
        for found in finding.summary[group].values()
        for estimate in found.values()
        if isinstance(estimate, dict) and estimate.get("low") is not None
    )
    return f"Below a value is its 95 % interval over items ({', '.join(methods)})." if methods else ""


def _differences(sources: Sequence[Source]) -> tables.Table | None:
    """The settings in which the runs differ."""
    different = differing([settings.flatten(ConfigDict(source.run.config)) for source in sources])
    if not different:
        return None
    columns = [tables.Column("Setting", False), *(tables.Column(s.run.label, False) for s in sources)]
    rows = [[Cell(name), *(Cell(_setting(value)) for value in values)] for name, values in different.items()]
    return tables.Table("Settings that differ", columns, rows)


def _setting(value: Any) -> str:
    return UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _description(source: Source) -> dict[str, Any]:
    """What is known of where a run's numbers come from."""
    config, environment = source.run.config, source.environment
    facts = [("directory", str(source.path))]
    if source.checkpoint is not None:
        facts += [("evaluation of", source.checkpoint), ("step", UNKNOWN if source.step is None else source.step)]
    else:
        facts.append(("evaluated at steps", ", ".join(map(str, sorted(source.run.evaluations))) or UNKNOWN))
    if source.is_trained:
        facts += [("method", source.run.method), ("seed", config["seed"])]
        facts.append(("model before training", config["model"]["source"]))
    if environment:
        devices = environment["devices"]
        facts += [
            ("command", shlex.join(environment["command"])),
            ("started", environment["started"]),
            ("devices", f"{devices['count']} × {devices['kind']}, processes: {devices['processes']}"),
            ("platform", environment["platform"]),
            ("versions", ", ".join(f"{name} {version}" for name, version in _versions(environment).items())),
        ]
    facts.append(("read from", ", ".join(source.files)))
    texts = [(f"context ({view})", _messages(messages)) for view, messages in source.contexts.items()]
    texts.append(("config", json.dumps(config, indent=2, ensure_ascii=False)))
    return {"label": source.run.label, "facts": facts, "texts": texts}


def _versions(environment: dict[str, Any]) -> dict[str, str]:
    return {"Python": environment["python"]} | environment["packages"]


def _messages(messages: Sequence[dict[str, str]]) -> str:
    """The text of a context, each message under its role."""
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages) or "(empty)"
