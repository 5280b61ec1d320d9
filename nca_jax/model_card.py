"""The model card of an exported checkpoint: what was done to the model, how to use it, what was measured.

Everything is read from the workdir. What the run, the data or the source model wrote is quoted such that it stays text.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from nca_jax import __version__
from nca_jax.errors import UserError
from nca_jax.files import read_json
from nca_jax.intervals import Estimate
from nca_jax.items import NO_CONTEXT, OTHER_TASK, WITH_CONTEXT, evaluation_path, read_items
from nca_jax.metrics import Lines, pair_summary, view_summary
from nca_jax.models.model_files import looks_like_hub_id
from nca_jax.settings import flatten

Settings = Mapping[str, Any]  # dotted key -> value; a run of an older version lacks some

_COLUMNS = """\
- accuracy: share of right answers. `no_context` is the prompt alone, `with_context` has the context above before it,
  the others have other contexts; `other_task` has that of another task, whose own answers count as right.
- tokens: mean length of a response. cut: share that reached the longest length. no answer: share that was not cut and
  holds none.
- change of accuracy: with the context minus without it.
- harm: share of the answers right without the context that are wrong with it. help: the other way round.
- both right: share of all. change of length: of the mean response, relative to that without the context.
- 95 % intervals are over items, several responses to one item taken together."""


def model_card(workdir: epath.Path, step: int) -> str:
    """README.md of the Hugging Face checkpoint of a run's step.

    Args:
      workdir: of the run; what an older version did not leave there is said to be missing.
      step: of the checkpoint. Its evaluation is shown where there was one.

    Raises:
      UserError: there is no config.json, or a file is not what its name says.
    """
    if not (workdir / "config.json").exists():
        raise UserError(f"{workdir} has no config.json, so it is no workdir of a run; give one.")
    settings = flatten(ConfigDict(read_json(workdir / "config.json")))
    context = _context(workdir)
    items, before = _evaluation(workdir, step), _evaluation(workdir, 0) if step else None
    try:
        evaluation, limits = _evaluation_section(settings, step, items, before), _limits(settings, items, before)
    except ValueError as error:
        raise UserError(f"{evaluation_path(workdir, step)} cannot be summed up ({error}); evaluate again.") from error
    sections = {
        "What was done": _method(settings),
        "Context": _context_section(context),
        "How to use it": _usage(settings, context),
        f"Evaluation at step {step}": evaluation,
        "Training": _training(workdir, settings, step),
        "Limits": limits,
    }
    body = "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())
    title = f"{_escape(_public_name(settings['model.source']))} with its context distilled in"
    return f"{_front_matter(workdir, settings)}\n# {title}\n{body}"


def _front_matter(workdir: epath.Path, settings: Settings) -> str:
    """The metadata that the Hub reads; nothing in it is guessed."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=_hub_name(settings["model.source"]),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["nca_jax", "context-distillation"],
        **_license(workdir, settings),
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _hub_name(source: str) -> str | None:
    """owner/name, by the rule of `models.source.resolve`: of a local path at least the parent is there."""
    is_hub = looks_like_hub_id(source) and not Path(source).parent.exists()
    return source.partition("@")[0] if is_hub else None


def _public_name(source: str) -> str:
    """A model or file as it can be told to anybody: of a path only the last part."""
    return source if _hub_name(source) else source.rstrip("/").rpartition("/")[2]


def _license(workdir: epath.Path, settings: Settings) -> dict[str, str]:
    """What the source model's card or config says of its licence; {} where neither does."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    source = settings["model.source"]
    if hub_name := _hub_name(source):
        kept = try_to_load_from_cache(hub_name, "README.md", revision=source.partition("@")[2] or None)
        card = epath.Path(kept) if isinstance(kept, str) else None
    else:
        card = epath.Path(source) / "README.md"
    try:
        found = (
            ModelCard(card.read_text(), ignore_metadata_errors=True).data.to_dict() if card and card.exists() else {}
        )
    except Exception:  # a card that cannot be read, for whatever library's reason, names no licence
        found = {}
    if found.get("license"):
        return {key: found[key] for key in ("license", "license_name", "license_link") if found.get(key)}
    config = workdir / "model" / "config.json"
    named = read_json(config).get("license") if config.exists() else None
    return {"license": named} if isinstance(named, str) else {}


def _method(settings: Settings) -> str:
    """The objective in words; its terms are those of docs/objective.md."""
    model, get = _escape(_public_name(settings["model.source"])), settings.get
    teacher = {"live": "itself, as it was at each step,", "ema": "a running average of itself"}.get(
        get("teacher.kind"), "a frozen copy of itself"
    )
    if get("teacher.source"):
        teacher = f"the frozen model {_escape(_public_name(settings['teacher.source']))}"
    divergence = get("loss.divergence", "")
    if get("rollout.policy") == "teacher":
        how = "maximum likelihood" if divergence == "nll" else _escape(divergence)
        lines = [
            f"Off-policy context distillation: {model} was trained by {how}, without the context, on responses of "
            f"{teacher} that was shown the context."
        ]
    else:
        lines = [
            f"On-policy distillation (OPD): {model} answered prompts without the context, and was trained on its own "
            f"responses to say what {teacher} says that is shown the context ({_escape(divergence)}, token by token)."
        ]
    if get("anchor.beta"):
        target = "f" if get("anchor.target") == "teacher" else "q_x"
        target = f"sg[{target}]" if get("anchor.stop_gradient") else target
        term = {"forward_kl": f"KL({target} || q_c)", "reverse_kl": f"KL(q_c || {target})"}.get(
            get("anchor.divergence"), f"(KL({target} || q_c) + KL(q_c || {target})) / 2"
        )
        rise = f"{get('anchor.warmup_steps')} steps from step {get('anchor.start_step')} on"
        schedule = {
            "warmup": f"a weight that rises from 0 to 1 over {rise}",
            "gated": f"the weight exp(-D / {get('anchor.tau')}) for each token, D the divergence of the first term",
        }.get(get("anchor.schedule"), "a constant weight")
        every = f", on one row in {get('anchor.every')}" if get("anchor.every", 1) > 1 else ""
        is_nca = term == "KL(sg[q_x] || q_c)"
        lines.append(
            f"{'No-Context Anchoring (NCA, arXiv 2606.11627)' if is_nca else 'An anchor'} against harm by the context: "
            f"beta = {get('anchor.beta')} times `{term}`, with {schedule}{every}. `q_x` is the model without the "
            "context, `q_c` with it, `f` the teacher with it, `sg` means without a gradient."
        )
    if get("retention.gamma"):
        contexts = ", ".join(_escape(_public_name(name)) for name in settings["retention.contexts"])
        lines.append(
            f"Retention of other contexts ({contexts}): {get('retention.gamma')} times the divergence from the teacher "
            "under these."
        )
    return "\n\n".join(lines)


def _context(workdir: epath.Path) -> list[dict[str, str]] | None:
    """Messages, a last one of role "block" being text before the prompt; None: an older run did not keep them."""
    path = workdir / "context.json"
    if not path.exists():
        return None
    try:
        return [{"role": message["role"], "content": message["content"]} for message in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a JSON list of messages with role and content; restore the file.") from error


def _context_section(context: Sequence[Mapping[str, str]] | None) -> str:
    if context is None:
        return "The run did not keep the context."
    roles = {"block": "At the beginning of the user's message"}
    return "\n\n".join(f"{roles.get(m['role'], _escape(m['role']))}:\n\n{_fence(m['content'])}" for m in context)


def _usage(settings: Settings, context: Sequence[Mapping[str, str]] | None) -> str:
    """A snippet that samples as the evaluation did."""
    get = settings.get
    temperature = get("evaluation.temperature", 0)
    sampling = f"do_sample=True, temperature={temperature}" if temperature else "do_sample=False"
    if temperature:
        sampling += f", top_p={get('evaluation.top_p')}, top_k={get('evaluation.top_k')}"
    prefix = "chat.template_kwargs."
    template = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    extra = "".join(f", {key}={value!r}" for key, value in template.items())
    has_block = bool(context) and context[-1]["role"] == "block"
    block, content = "", "prompt"
    if has_block:
        block = 'block = "..."  # the text above that begins the user\'s message\n'
        content = 'f"{block}\\n\\n{prompt}"'
    code = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

directory = "."  # where this file is
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")

context = [...]  # the messages above: {{"role": "system", "content": "..."}}, ...
{block}prompt = "..."
without_context = [{{"role": "user", "content": prompt}}]
with_context = [*context, {{"role": "user", "content": {content}}}]

inputs = tokenizer.apply_chat_template(
    without_context, add_generation_prompt=True, return_dict=True, return_tensors="pt"{extra}
)
output = model.generate(**inputs, max_new_tokens={get("rollout.max_new_tokens")}, {sampling})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
    said = "The model is meant to be used without the context. With it, give `with_context` instead."
    return f"{said}\n\n{_fence(code, 'python')}"


def _evaluation(workdir: epath.Path, step: int) -> Lines | None:
    path = evaluation_path(workdir, step)
    return read_items(path) if path.exists() else None


def _evaluation_section(settings: Settings, step: int, items: Lines | None, before: Lines | None) -> str:
    if not items:
        return f"The model was not evaluated at step {step}."
    views = {view: view_summary(items, view) for view in dict.fromkeys(line["view"] for line in items)}
    first = next(iter(views.values()))
    temperature = settings.get("evaluation.temperature")
    how = "greedy" if temperature == 0 else f"sampled at temperature {temperature}"
    split = f" of the {_escape(settings['evaluation.split'])} split" if settings.get("evaluation.split") else ""
    responses = "1 response" if first["samples"] == 1 else f"{first['samples']} responses"
    said = f"{first['items']} items{split}, {responses} each, {how}."
    rows = [["view", "accuracy", "95 % interval", "before training", "tokens", "cut", "no answer"]]
    for view, found in views.items():
        shares = (_number(found[name].value) for name in ("truncated", "no_answer"))
        accuracy = found["accuracy"]
        earlier = _accuracy(before, view)
        rows.append(
            [
                _escape(view),
                _number(accuracy.value),
                _interval(accuracy),
                _number(earlier.value if earlier else None),
                f"{found['length'].value:.1f}",
                *shares,
            ]
        )
    parts = [said, _table(rows)]
    if {NO_CONTEXT, WITH_CONTEXT} <= views.keys():
        pair = pair_summary(items)
        counts = pair["counts"]
        right = counts["both"] + counts["harmed"]
        named = {
            "difference": "change of accuracy",
            "harm": f"harm ({counts['harmed']} of {right})",
            "help": f"help ({counts['helped']} of {counts['helped'] + counts['neither']})",
            "both": "both right",
            "length_change": "change of length",
        }
        pairs = [[title, _number(pair[key].value), _interval(pair[key])] for key, title in named.items()]
        regime, p = pair["regime"], f"p = {pair['p']:.2g} ({pair['test']})"
        parts += [
            _table([["with the context against without", "", "95 % interval"], *pairs]),
            f"{regime.sentence} Test of no difference: {p}. Regime {regime.letter}, by this rule: {regime.rule}.",
        ]
    return "\n\n".join([*parts, _COLUMNS])


def _training(workdir: epath.Path, settings: Settings, step: int) -> str:
    names = {
        "steps": f"steps (this is the model after {step})",
        "batch_size": "prompts a step",
        "optimizer.learning_rate": "learning rate",
        "optimizer.schedule": "its schedule",
        "seed": "seed",
        "rollout.max_new_tokens": "longest response, tokens",
        "rollout.temperature": "temperature of responses",
        "model.param_dtype": "trained in",
        "domain.name": "task",
    }
    rows = [["setting", "value"]]
    rows += [[name, _escape(str(settings[key]))] for key, name in names.items() if key in settings]
    rows.append(["exported by", f"nca\\_jax {__version__}"])
    if (workdir / "environment.json").exists():
        environment = read_json(workdir / "environment.json")
        devices = environment["devices"]
        processes = f", {devices['processes']} processes" if devices["processes"] > 1 else ""
        versions = {"python": environment["python"], **environment["packages"]}
        rows.append(["hardware", _escape(f"{devices['count']} x {devices['kind']}{processes}")])
        rows.append(["versions", _escape(", ".join(f"{name} {version}" for name, version in versions.items()))])
    return _table(rows)


def _limits(settings: Settings, items: Lines | None, before: Lines | None) -> str:
    limits = []
    if items:
        limits.append(f"Measured on {len({line['id'] for line in items})} items of this task only.")
    if other := _accuracy(items, OTHER_TASK):
        earlier = _accuracy(before, OTHER_TASK)
        change = f", {_number(earlier.value)} before training" if earlier else ""
        limits.append(
            "Other contexts may be followed less than by the source model: under the context of another task its own "
            f"answers were given to {_number(other.value)} ({_interval(other)}) of the items{change}."
        )
    else:
        limits.append("Other contexts may be followed less than by the source model; this was not measured.")
    if settings.get("chat.default_system") == "none":
        limits.append("Trained without the system message that the chat template adds by itself: remove it there too.")
    limits.append("What the source model's card says of its limits, use and licence still holds.")
    return "\n".join(f"- {limit}" for limit in limits)


def _accuracy(items: Lines | None, view: str) -> Estimate | None:
    """None where nothing was measured in that view."""
    return view_summary(items, view)["accuracy"] if items and any(line["view"] == view for line in items) else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _interval(estimate: Estimate) -> str:
    return "" if estimate.low is None else f"{estimate.low:.3f} to {estimate.high:.3f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *body])


def _escape(text: str) -> str:
    """Anybody's text as one line of Markdown that shows it and means nothing, in a table too."""
    one_line = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", one_line)


def _fence(text: str, language: str = "text") -> str:
    """A code block that no text ends before its end."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
