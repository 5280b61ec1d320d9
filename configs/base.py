"""Defaults that all settings share. Every line says its unit, its reason or where it is from.

[C] is read in the public code of OPCD (arXiv 2602.12275), [N] are third-party notes on NCA (arXiv 2606.11627).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """The training job without a model and a domain, which each setting names."""
    config = ConfigDict()
    config.seed = 0  # of data order, sampling and random weights
    config.steps = 50  # optimizer steps [C]
    config.batch_size = 128  # prompts a step, one response each [C]
    config.accumulation = 1  # micro-batches a step, must divide batch_size; 0: as many as give each device one row
    config.lengths = 1  # programs for micro-batches: 2, 3: those whose rows are short run at 1/2, 1/4 of the length

    config.model = ConfigDict()
    config.model.source = placeholder(str)  # directory, gs:// path, Hub id owner/name[@revision], packaged model
    config.model.preset = placeholder(
        str
    )  # its architecture by name, for planning without it; checked when it is there
    config.model.param_dtype = "float32"  # master weights
    config.model.compute_dtype = "auto"  # bfloat16 on TPU and GPU, float32 on CPU
    config.model.attention = "auto"  # auto (splash on TPU, cudnn on GPU, xla on CPU) | xla | splash | cudnn
    config.model.remat = "full"  # none | dots | full: what the backward pass recomputes

    config.teacher = ConfigDict()
    config.teacher.kind = "frozen"  # frozen [C] | live (the student as it is) | ema (its average)
    config.teacher.ema_rate = 0.05  # ema: share of the student that enters at each step
    config.teacher.source = placeholder(str)  # frozen: another checkpoint; unset: the student's initial weights [C]
    config.teacher.preset = placeholder(str)  # as model.preset, of teacher.source
    config.teacher.other_template = False  # True: a teacher trained with another chat template is let pass
    config.teacher.dtype = "auto"  # bfloat16 on TPU and GPU [C], float32 on CPU

    config.domain = ConfigDict()
    config.domain.name = placeholder(str)
    config.domain.settings = ConfigDict()  # arguments of the domain

    config.context = ConfigDict()
    config.context.file = placeholder(str)  # .txt (a system message) or .json (messages); unset: the domain's own
    config.context.text = placeholder(str)  # or the text of a system message itself

    config.chat = ConfigDict()
    config.chat.default_system = "template"  # template | none: keep or remove what the template adds by itself
    config.chat.date = "26 Jul 2024"  # for templates that print today's date; the same in every view
    config.chat.template_kwargs = ConfigDict()  # such as enable_thinking

    config.data = ConfigDict()
    config.data.max_prompt_tokens = 4096  # of a whole prompt, context included [C]
    config.data.too_long = "error"  # error | skip: prompts are never cut

    config.data.max_train_items = placeholder(int)  # so many training examples, drawn by the seed; unset: all
    config.data.length_multiple = 16  # prompts are padded to multiples of it: fewer shapes, fewer compilations

    config.rollout = ConfigDict()
    config.rollout.max_new_tokens = 512  # longest response; truncated ones are trained on [C]
    config.rollout.slots = 0  # responses decoded side by side; one that ends makes room for the next; 0: all at once
    config.rollout.policy = "student"  # student, without the context (OPD) | teacher, with it (off-policy baselines)
    config.rollout.temperature = 1.0  # also divides the logits of the loss [C]
    config.rollout.top_p = 1.0  # 1: off
    config.rollout.top_k = 0  # 0: off

    config.loss = ConfigDict()
    config.loss.divergence = "reverse_kl"  # q_x from f: reverse_kl (OPD) | forward_kl | symmetric_kl | jsd | nll (SFT)
    config.loss.jsd_weight = 0.5  # jsd: of the student in the mixture, inside (0, 1)
    config.loss.entry_clip = placeholder(float)  # at most so many nats of one token id; unset: no bound
    config.loss.support = "student_top_k"  # full | student_top_k (no-context view) | teacher_top_k; both terms
    config.loss.top_k = 256  # [N]; OPCD too [C]
    config.loss.tail = "renormalize"  # none | renormalize | bucket; renormalize [N], none in OPCD [C]
    config.loss.reduction = "token"  # token | sequence: mean over all response tokens of the step [C]
    config.loss.chunk_size = 1024  # response positions whose logits a data group has in memory at one time

    config.anchor = ConfigDict()
    config.anchor.beta = 0.5  # best of 0.1 / 0.5 / 1.0 [N]; 0 is plain OPD
    config.anchor.target = "student"  # what q_c is tied to: student, q_x (NCA) | teacher, f ("dual")
    config.anchor.divergence = "forward_kl"  # of q_c: forward_kl, KL(target || q_c) (NCA) | reverse_kl | symmetric_kl
    config.anchor.stop_gradient = True  # False: the anchor pulls q_x as well
    config.anchor.every = 1  # rows of the batch: the anchor on every so many-th, unbiased and cheaper
    config.anchor.schedule = "constant"  # constant (the paper) | warmup | gated
    config.anchor.start_step = 0  # warmup: first step with a weight above 0
    config.anchor.warmup_steps = 10  # warmup: steps from weight 0 to 1
    config.anchor.tau = 0.25  # gated: weight exp(-KL / tau), in nats

    config.retention = ConfigDict()  # ours, see docs/objective.md: other contexts are still to be followed
    config.retention.gamma = 0.0  # weight; 0: off, as in the reference
    config.retention.contexts = ()  # names that the domain knows, or files: .json (messages) or .txt (a system message)
    config.retention.samples = "step"  # step: drawn from the teacher at every step | cached: once, before training

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 5e-6  # [C]; 1e-6 for larger models
    config.optimizer.schedule = "constant"  # constant [C] | linear | cosine, to 0 at the last step
    config.optimizer.warmup_steps = 0  # [C]
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.999  # [C]
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.01  # [C]
    config.optimizer.clip_norm = 1.0  # global gradient norm [C]

    config.evaluation = ConfigDict()
    config.evaluation.split = "validation"  # validation | test; test only for a last number, never to choose by
    config.evaluation.every = 10  # steps; also after the last
    config.evaluation.at_start = True  # also before the first
    config.evaluation.batch_size = 32  # rows sampled at once
    config.evaluation.contexts = ()  # also tried: names that the domain knows, of domains/variants.py, or files
    config.evaluation.samples = 1  # responses of each item in each view
    config.evaluation.divergence = "with_context"  # none | with_context | all: KL of views on the same tokens
    config.evaluation.max_items = 500  # held-out items [C]
    config.evaluation.temperature = 1.0  # [C]; 0 is greedy
    config.evaluation.top_p = 0.95  # [C]
    config.evaluation.top_k = 20  # [C]

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 2  # steps [C]; also after the last
    config.checkpoint.minutes = 0.0  # also when so many have passed since the last one; 0: off
    config.checkpoint.keep = 2  # newest ones
    config.checkpoint.keep_best = 0  # and those with the best no-context accuracy on the evaluation split

    config.export = ConfigDict()  # at the end, to <workdir>/huggingface
    config.export.huggingface = False  # True: a directory that transformers and servers load
    config.export.dtype = "source"  # source (as the model came) | float32 | bfloat16 | float16
    config.export.shard_gb = 5.0  # largest file

    config.log = ConfigDict()
    config.log.samples_every = 5  # steps between entries of samples.jsonl
    config.log.samples = 4  # prompts per entry, each answered in both views
    config.log.figures = True  # after each evaluation, for TensorBoard: those of nca_jax.report
    config.log.wandb = ConfigDict()  # Weights & Biases; pip install wandb
    config.log.wandb.project = placeholder(str)  # unset: off
    config.log.wandb.entity = placeholder(str)
    config.log.wandb.mode = "online"  # online | offline: kept in the workdir, for wandb sync

    config.profile = ConfigDict()  # a trace for xprof, in <workdir>/profile
    config.profile.first_step = 3  # later than what is compiled at first
    config.profile.steps = 0  # 0: no trace

    config.watchdog = ConfigDict()
    config.watchdog.minutes = 30.0  # without progress until a job of several processes ends with code 75; 0: off

    config.mesh = ConfigDict()
    config.mesh.replica = 0  # copies of the weights, each within a slice; 0: one for each slice
    config.mesh.data = 1  # copies of the weights within a replica
    config.mesh.fsdp = -1  # shards of weights and optimizer; -1: all devices that are left
    config.mesh.tensor = 1  # shards of heads, mlp and vocabulary
    config.mesh.decode_tensor = 0  # devices that hold the weights together while sampling; 0: the fewest for decode_gb
    config.mesh.decode_gb = 4.0  # GB of weights a device while sampling, beside the training state
    return config
