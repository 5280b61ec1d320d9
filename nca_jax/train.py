"""The training job, read top to bottom."""

import contextlib
import itertools
import time
from functools import partial

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from nca_jax import processes, run_files, settings
from nca_jax.assembly import assemble
from nca_jax.axes import parts
from nca_jax.batches import Batches, Teachers
from nca_jax.checkpoint import Checkpoints
from nca_jax.data.chat import pack_view
from nca_jax.data.pipeline import encode_pairs, fitting, some_of, training_indices
from nca_jax.domains import domain_of
from nca_jax.domains.base import find_context
from nca_jax.errors import Preempted, UserError
from nca_jax.evaluation import make_evaluator, summarise
from nca_jax.game_batches import GameBatches
from nca_jax.items import evaluation_path, write_items
from nca_jax.layout import layout_table
from nca_jax.live_figures import LiveFigures
from nca_jax.logbook import Logbook
from nca_jax.models.source import load_weights, open_model, resolve
from nca_jax.preemption import Agreement, StopSignals
from nca_jax.profiler import Profile
from nca_jax.session import judged_text
from nca_jax.sharding import make_mesh
from nca_jax.step_log import Dispatched, StepLog, step_work
from nca_jax.timeline import Timeline
from nca_jax.wandb_log import WandbLog
from nca_jax.watchdog import Watchdog
from nca_jax.workdir_lock import locked


def train(config: ConfigDict, workdir: str) -> str:
    """Runs or continues the job in `workdir` and returns its summary line.

    All processes of a job call this with the same arguments; the workdir is one that they share.

    Raises:
      UserError: a config, model or data that cannot work, or a loss that is not finite.
      Preempted: a signal has asked for the end; the state is saved, and the same call continues.
    """
    with contextlib.ExitStack() as resources:
        return _train(config, epath.Path(workdir), resources)


def _train(config: ConfigDict, workdir: epath.Path, resources: contextlib.ExitStack) -> str:
    started = time.monotonic()
    settings.check(config)
    first = processes.is_first()
    signals = resources.enter_context(StopSignals())

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
        pairs = [begun + encode_pairs(chat, last, c) for begun, c in zip(pairs, contexts, strict=True)]
    kept = fitting([*examples, *examples][: len(pairs[0])], pairs, *limit)
    examples = [examples[i] for i in kept if i < len(examples)]
    pack = partial(pack_view, length_multiple=config.data.length_multiple, prefix_multiple=parts(mesh, "prefix"))
    view_x = pack([pairs[0][i].no_context for i in kept])
    view_c, *other_views = (pack([of_context[i].with_context for i in kept]) for of_context in pairs)
    indices = training_indices(len(examples), config.batch_size, config.seed)
    evaluator = make_evaluator(config, domain, chat, job.student, decode)

    # ---------------------------------------------------------------- start or resume
    processes.in_first(lambda: resources.enter_context(locked(workdir)))
    fingerprint, keep_best = settings.fingerprint(config), config.checkpoint.keep_best
    checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep, fingerprint, keep_best)
    watchdog = Watchdog(
        workdir / "heartbeats",
        jax.process_index(),
        jax.process_count(),
        config.watchdog.minutes if jax.process_count() > 1 else 0,  # a process alone is looked after by its user
        attempt=str(int(processes.of_first(np.int32(time.time())))),
    )
    resources.callback(watchdog.close)
    restored = checkpoints.restore_latest(job.abstract_state)
    if restored:
        state, position, start = restored
        indices.set_state(position["iterator"])
        spent = position["seconds"]
    else:
        params = load_weights(source, student.arch, settings.dtype(config.model.param_dtype), job.student_sharding)
        state = job.initial_state(params)
        position, start, spent = {}, 0, 0.0
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
    model_config = run_files.keep_description(workdir, config, domain.context, student.directory)
    if config.retention.samples == "cached" and job.objective.gamma:
        batches.cache_retained(workdir / "retention.npz")
    others: list[WandbLog] = []
    if config.log.wandb.project:
        processes.in_first(lambda: others.append(WandbLog(workdir, config)))
    logbook = Logbook(workdir, start if restored else None, config.steps, first, others)
    resources.callback(logbook.close)
    logbook.say(layout_table(config, job, student.arch, teacher_model.arch, mesh))
    logbook.say(f"{'continuing at' if restored else 'starting at'} step {start} of {config.steps} in {workdir}")
    figures = None
    if config.log.figures and first:
        figures = LiveFigures(workdir, settings.method_name(config), start)
    timeline = Timeline(position.get("timeline"), began=started)
    resources.callback(timeline.close)
    profile = Profile(workdir / "profile", config.profile.first_step, config.profile.steps if first else 0)
    resources.callback(profile.close)
    timeline.mark("start")

    def seconds() -> float:
        return spent + time.monotonic() - started

    def evaluate(step: int) -> float:
        began = time.monotonic()
        params = job.student.layout(state.params)
        results = evaluator(params, before=lambda view: watchdog.beat(step, f"evaluation {view}"))
        summary = summarise(results)
        if first:
            write_items(evaluation_path(workdir, step), itertools.chain(*results.values()))
        if figures:
            logbook.images(step, figures.after_evaluation(step, logbook.records()))
        timeline.mark("evaluation")
        record = {f"eval/{name}": value for name, value in summary.items()}
        totals = timeline.seconds() | {"lost": timeline.lost()}
        times = {"time/eval_seconds": time.monotonic() - began, "time/goodput": timeline.goodput()}
        times |= {f"time/total_{phase}_seconds": value for phase, value in totals.items()}
        logbook.metrics(step, record | times)
        shown = " ".join(f"{name} {summary[name]:.2f}" for name in results)
        logbook.say(f"evaluation at step {step}: {shown} harm {summary['harm']:.3f} both {summary['both']:.2f}")
        return summary["no_context"]

    def save(step: int, accuracy: float | None, evaluation_due: bool) -> None:
        watchdog.beat(step, "save")
        logbook.flush()
        kept = {"iterator": indices.get_state(), "seconds": seconds(), "timeline": timeline.state()}
        checkpoints.save(state, kept | {"evaluation_due": evaluation_due}, step, accuracy)
        timeline.mark("save")

    # ---------------------------------------------------------------- the loop
    owed = position.get("evaluation_due") and not processes.of_first(np.array(logbook.has_evaluation(start)))
    if owed or (start == 0 and config.evaluation.at_start):
        evaluate(start)
    work = step_work(config, student.arch, teacher_model.arch)
    bad = partial(_stop_not_finite, workdir, checkpoints)
    steps = StepLog(logbook, timeline, job.learning_rate, start, config.steps, work, bad)
    saved_at = time.monotonic()

    def wishes() -> tuple[bool, bool]:
        """To stop, and to save because it is time. What one process wants, all of them do, after the same step."""
        return signals.received is not None, _overdue(config, saved_at)

    agreement = Agreement(mesh, wishes)
    for step in range(start + 1, config.steps + 1):
        agreement.cast()
        watchdog.beat(step, "rollout")
        profile.before(step)
        index = next(indices)
        drawn = batches.batch(state, index, step)
        timeline.mark("rollout", drawn.batch.response_mask_BxR, step)
        shown = None
        if step % config.log.samples_every == 0:
            shown = batches.show(state, index, step, drawn)
            timeline.mark("samples", shown.ready, step)
        watchdog.beat(step, "step")
        state, metrics = job.train_step(state, teachers.of_step(step), drawn.batch)
        timeline.mark("step", metrics["loss"], step)
        profile.after(step, metrics["loss"])
        steps.dispatched(Dispatched(step, metrics | drawn.metrics, drawn.batch))
        if shown:
            logbook.samples(step, shown.records())
        stop, overdue = agreement.result()
        last, accuracy = step == config.steps, None
        evaluation_due = last or step % config.evaluation.every == 0
        if evaluation_due and not stop:  # there may be seconds left; then it is done when the run goes on
            steps.settle()
            accuracy = evaluate(step)
        best = accuracy is not None and keep_best
        if last or stop or overdue or best or step % config.checkpoint.every == 0:
            steps.settle()  # never a checkpoint of a step whose loss nobody has looked at
            save(step, accuracy, evaluation_due and stop)
            saved_at = time.monotonic()
        if stop:
            checkpoints.close()
            logbook.say(timeline.summary())
            raise Preempted(f"stopped at step {step} of {config.steps} by a signal; the same command continues.")

    # ---------------------------------------------------------------- summary
    checkpoints.close()
    if config.export.huggingface and not (start == config.steps and (workdir / "huggingface").exists()):
        watchdog.beat(config.steps, "export")
        run_files.export(config, workdir, student.arch, state.params, model_config)
        logbook.say(f"exported to {workdir / 'huggingface'}")
    finished = run_files.finished_summary(workdir)
    processes.wait_for_all("the end")  # nobody leaves, and nobody writes the summary, before all have come here
    if start == config.steps and finished:
        return finished
    logbook.say(timeline.summary())
    if not first:
        return ""
    summary = run_files.summary_line(config, logbook.last_evaluation(), seconds() if start < config.steps else spent)
    run_files.keep_summary(workdir, summary)
    return summary


def _overdue(config: ConfigDict, saved_at: float) -> bool:
    minutes = config.checkpoint.minutes
    return bool(minutes) and processes.is_first() and time.monotonic() - saved_at >= 60 * minutes


def _stop_not_finite(workdir: epath.Path, checkpoints: Checkpoints, bad: Dispatched, values: dict) -> None:
    """Saves the batch of the bad step and ends the run; what is checkpointed is from before it."""
    checkpoints.wait()
    path = workdir / f"not_finite_step_{bad.step}.npz"
    run_files.keep_batch(path, bad.batch)
    raise UserError(
        f"step {bad.step}: the loss ({values['loss']}) or its gradient ({values['grad_norm']}) is not finite; the "
        f"batch is in {path} and the last checkpoint is intact; try a lower optimizer.learning_rate."
    )
