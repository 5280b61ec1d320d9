"""The training job, read top to bottom."""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.assembly import assemble
from nca_jax.axes import parts
from nca_jax.batches import Batches, Teachers
from nca_jax.checkpoint import Checkpoints
from nca_jax.data.chat import Context, pack_view
from nca_jax.data.pipeline import encode_pairs, fitting, some_of, training_indices
from nca_jax.domains import domain_of
from nca_jax.domains.base import context_file, find_context
from nca_jax.errors import UserError
from nca_jax.evaluate import IRRELEVANT, make_evaluator, summarise, write_items
from nca_jax.files import read_json, write_json, write_text
from nca_jax.game_batches import GameBatches
from nca_jax.logbook import Logbook
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params
from nca_jax.models.export import export_dtype, write_huggingface
from nca_jax.models.huggingface import tensors_to_write
from nca_jax.models.layers import pieces_of
from nca_jax.models.model_files import copy_companions
from nca_jax.models.source import load_weights, open_model, resolve
from nca_jax.session import judged_text
from nca_jax.sharding import make_mesh
from nca_jax.train_step import Batch


def train(config: ConfigDict, workdir: str) -> str:
    """Runs or continues the job in `workdir` and returns its summary line.

    Raises:
      UserError: a config, model or data that cannot work, or a loss that is not finite.
    """
    started = time.monotonic()
    settings.check(config)
    workdir = epath.Path(workdir)

    # ---------------------------------------------------------------- mesh, model, teacher
    mesh = make_mesh(config.mesh)
    source = resolve(config.model.source)
    student = open_model(source, config.model.preset)
    teacher_model = student
    if config.teacher.source:
        teacher_model = open_model(resolve(config.teacher.source), config.teacher.preset)
    student.check_same_tokenizer(teacher_model, config.teacher.other_template)
    job = assemble(config, student.arch, teacher_model.arch, student.eos_ids, len(student.tokenizer), mesh)

    # ---------------------------------------------------------------- data
    domain = domain_of(config)
    chat = student.chat_format(config.chat)
    decode = partial(judged_text, student, chat)
    limit = (config.data.max_prompt_tokens, config.data.too_long)
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if longest > student.arch.max_positions:
        raise UserError(
            f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}, beyond the model's "
            f"{student.arch.max_positions} positions; lower one of them."
        )
    examples = some_of(domain.examples("train"), config.data.max_train_items, config.seed)
    prompts = [domain.messages(example) for example in examples]
    contexts = [domain.context, *(find_context(domain, name) for name in config.retention.contexts)]
    pairs = [encode_pairs(chat, prompts, context) for context in contexts]
    chat.log_pair(pairs[0][0])
    if domain.is_multi_turn:  # the prompts of later turns are made as games go; what leads them, and that they fit, now
        last = [domain.last_messages(example) for example in examples]
        pairs = [first + encode_pairs(chat, last, c) for first, c in zip(pairs, contexts, strict=True)]
    kept = fitting([*examples, *examples][: len(pairs[0])], pairs, *limit)
    examples = [examples[i] for i in kept if i < len(examples)]
    pack = partial(pack_view, length_multiple=config.data.length_multiple, prefix_multiple=parts(mesh, "prefix"))
    view_x = pack([pairs[0][i].no_context for i in kept])
    view_c, *other_views = (pack([of_context[i].with_context for i in kept]) for of_context in pairs)
    indices = training_indices(len(examples), config.batch_size, config.seed)
    evaluator = make_evaluator(config, domain, chat, job.student, decode)

    # ---------------------------------------------------------------- start or resume
    workdir.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep, settings.fingerprint(config))
    restored = checkpoints.restore_latest(job.abstract_state)
    if restored:
        state, position, start = restored
        indices.set_state(position["iterator"])
        spent = position["seconds"]
    else:
        params = load_weights(source, student.arch, settings.dtype(config.model.param_dtype), job.student_sharding)
        state = job.initial_state(params)
        start, spent = 0, 0.0
        del params  # donated
    frozen, teaching = None, job.student
    if job.objective.teacher == "frozen":
        # Arrays of its own also where it starts as the student: the student's are donated to every step.
        teaching = job.teacher
        dtype = settings.dtype(config.teacher.dtype)
        frozen = load_weights(teacher_model.directory, teacher_model.arch, dtype, job.teacher_sharding)
    sampled = (teaching, config.rollout.top_k)
    teachers = Teachers(job.objective.teacher, frozen, job.encode_teacher, *sampled, view_c, other_views)
    fed = (config, mesh, job.student, decode, examples, view_x, view_c, teachers)
    games = {"domain": domain, "chat": chat, "others": contexts[1:]}
    batches = GameBatches(*fed, **games) if domain.is_multi_turn else Batches(*fed)
    _keep_context(workdir / "context.json", domain.context)
    write_json(workdir / "config.json", config.to_dict())
    model_config = _keep_small_files(student.directory, workdir / "model")
    if config.retention.samples == "cached" and job.objective.gamma:
        batches.cache_retained(workdir / "retention.npz")
    logbook = Logbook(workdir, start if restored else None, config.steps)
    logbook.say(f"{'continuing at' if restored else 'starting at'} step {start} of {config.steps} in {workdir}")

    def seconds() -> float:
        return spent + time.monotonic() - started

    def evaluate(step: int) -> None:
        began = time.monotonic()
        results = evaluator(job.student.layout(state.params))
        write_items(workdir / "evaluations" / f"step_{step:08d}.jsonl", results)
        summary = summarise(results)
        record = {f"eval/{name}": value for name, value in summary.items()}
        logbook.metrics(step, record | {"time/eval_seconds": time.monotonic() - began})
        shown = " ".join(f"{name} {summary[name]:.2f}" for name in results)
        logbook.say(f"evaluation at step {step}: {shown} harm {summary['harm']:.3f} both {summary['both']:.2f}")

    # ---------------------------------------------------------------- the loop
    if start == 0:
        evaluate(0)
    steps = _StepLog(logbook, job.learning_rate, start, config.steps, partial(_stop_not_finite, workdir, checkpoints))
    for step in range(start + 1, config.steps + 1):
        index = next(indices)
        drawn = batches.batch(state, index, step)
        sample_step = step % config.log.samples_every == 0
        records = batches.show(state, index, step, drawn) if sample_step else None
        state, metrics = job.train_step(state, teachers.of_step(step), drawn.batch)
        steps.dispatched(_Dispatched(step, metrics | drawn.metrics, drawn.batch))
        if records:
            logbook.samples(step, records())
        last = step == config.steps
        if last or step % config.evaluation.every == 0:
            steps.settle()
            evaluate(step)
            steps.restart_clock()
        if last or step % config.checkpoint.every == 0:
            steps.settle()  # never a checkpoint of a step whose loss nobody has looked at
            checkpoints.save(state, {"iterator": indices.get_state(), "seconds": seconds()}, step)

    # ---------------------------------------------------------------- summary
    checkpoints.close()
    if config.export.huggingface and not (start == config.steps and (workdir / "huggingface").exists()):
        _export(config, workdir, student.arch, state.params, model_config)
        logbook.say(f"exported to {workdir / 'huggingface'}")
    final = logbook.last_evaluation()
    logbook.close()
    written = workdir / "summary.txt"
    if start == config.steps and written.exists():  # finished before: the same line again
        return written.read_text().strip()
    summary = summary_line(config, final, seconds() if start < config.steps else spent)
    write_text(written, summary + "\n")
    return summary


def _keep_small_files(source: str, target: epath.Path) -> dict[str, Any]:
    """Config and tokenizer files beside the run: its checkpoints can be exported wherever it is carried. Returns the
    model's config.json."""
    config = read_json(epath.Path(source) / "config.json")
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        copy_companions(source, target)
        write_json(target / "config.json", config)
    return config


def _keep_context(path: epath.Path, context: Context) -> None:
    """The context as it is trained with, in the form that `context.file` reads.

    Raises:
      UserError: the run was started with another one.
    """
    messages = [dict(message) for message in context_file(context)]
    if path.exists() and json.loads(path.read_text()) != messages:
        raise UserError(f"{path} is another context than the one given now; use another --workdir, or that context.")
    write_json(path, messages)


def _export(config: ConfigDict, workdir: epath.Path, arch: Architecture, params: Params, model_config: dict) -> None:
    dtype = export_dtype(config.export.dtype, model_config)
    write_huggingface(
        workdir / "huggingface",
        arch,
        tensors_to_write(arch, pieces_of(params), dtype),
        model_config,
        str(workdir / "model"),
        dtype=dtype,
        shard_bytes=int(config.export.shard_gb * 1e9),
        overwrite=True,
    )


def summary_line(config: ConfigDict, evaluation: dict[str, float], seconds: float) -> str:
    """One line that says how a run ended; `seconds` is its wall-clock time, all of its parts together."""
    shown = {
        "no_context": "no_context",
        "with_context": "with_context",
        "harm": "harm",
        "both": "both",
        "length_change": "length_change",
        IRRELEVANT: "other_context",
    }
    values = " ".join(
        f"{name}={evaluation[f'eval/{key}']:.3f}" for key, name in shown.items() if f"eval/{key}" in evaluation
    )
    method = settings.method_name(config)
    return f"summary method={method} {values} steps={evaluation['step']} seconds={seconds:.0f}"


class _Dispatched(NamedTuple):
    """A step the device has been given, and its batch in case it turns out bad."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch


class _StepLog:
    """Reads a step's metrics only after the next one was dispatched, so that the device never waits for the log."""

    def __init__(self, logbook: Logbook, learning_rate: Callable, start: int, total: int, stop_not_finite: Callable):
        self._logbook, self._learning_rate, self._stop_not_finite = logbook, learning_rate, stop_not_finite
        self._start, self._total, self._empty = start, total, 0
        self._pending: _Dispatched | None = None
        self._training_seconds = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        """What has happened since the last step (an evaluation) does not count as training time."""
        self._before = time.monotonic()

    def dispatched(self, step: _Dispatched) -> None:
        self.settle()
        self._pending = step

    def settle(self) -> None:
        """Waits for the last dispatched step and logs it, or stops the run if it was not finite."""
        if self._pending is None:
            return
        last, self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(last.metrics).items()}
        if not values.pop("finite"):
            self._stop_not_finite(last, values)
        if not values["tokens"]:
            self._empty += 1
            self._logbook.say(f"warning: step {last.step} had no response token ({self._empty} such steps so far)")
        elapsed = time.monotonic() - self._before
        self._training_seconds += elapsed
        self.restart_clock()
        values |= {
            "learning_rate": float(self._learning_rate(last.step - 1)),
            "time/seconds": elapsed,
            "time/tokens_per_second": values["tokens"] / elapsed,
        }
        self._logbook.metrics(last.step, values)
        seconds_left = self._training_seconds / (last.step - self._start) * (self._total - last.step)
        self._logbook.progress(last.step, values, values["time/tokens_per_second"], seconds_left)


def _stop_not_finite(workdir: epath.Path, checkpoints: Checkpoints, bad: _Dispatched, values: dict) -> None:
    """Saves the batch of the bad step and ends the run; what is checkpointed is from before it."""
    checkpoints.wait()
    path = workdir / f"not_finite_step_{bad.step}.npz"
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(bad.batch))
    with path.open("wb") as file:
        np.savez(file, **{jax.tree_util.keystr(key).strip("."): leaf for key, leaf in leaves})
    raise UserError(
        f"step {bad.step}: the loss ({values['loss']}) or its gradient ({values['grad_norm']}) is not finite; the "
        f"batch is in {path} and the last checkpoint is intact; try a lower optimizer.learning_rate."
    )
