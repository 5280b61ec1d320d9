"""TRL's side: its trainer for privileged contexts, `trl.experimental.sdft`, and transformers' `generate`.

Full logits, alpha 1 (the reverse KL of the paper), one generation, the base model as teacher. The trainer's own
`training_step` does rollout, forward passes, loss and backward pass; clipping and the update follow as in its loop,
which cannot be stopped between two steps. What is ours in here: token ids in place of texts, responses that are given
where none is to be drawn, and the anchor, which TRL does not have.
"""

import argparse
import os
import tempfile
from importlib.metadata import version

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdft.loss_utils import compute_full_logit_self_distillation_loss

from benchmarks.peers.inputs import digest, load_inputs, prompts
from benchmarks.peers.worker import peak_mb, reset_peak, serve, timed


class TokenTrainer(SDFTTrainer):
    """The trainer on token ids.

    Attributes:
      ids: text of a prompt -> its token ids; the texts "0", "1", ... are the rows, "c0", "c1", ... with the context.
      responses: of the rows; None: the trainer draws them.
      beta: weight of the anchor.
      fed: what the trainer made of the rows in the last step.
    """

    ids: dict[str, list[int]]
    responses: list[list[int]] | None = None
    beta: float = 0.0
    fed: dict[str, torch.Tensor]

    def _tokenize_prompts(self, prompts):
        return [self.ids[prompt] for prompt in prompts]

    def _generate(self, prompt_ids):
        return super()._generate(prompt_ids) if self.responses is None else (prompt_ids, self.responses)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.fed = inputs
        if not self.beta:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        logits = self._compute_teacher_student_logits(model, self.teacher_model, inputs)
        loss = self._compute_self_distillation_loss(model, inputs, logits)
        with_context_BxRxV = self._forward_logits(
            model,
            inputs["teacher_input_ids"],
            inputs["teacher_attention_mask"],
            logits_to_keep=inputs["completion_ids"].shape[1],
        )
        # Alpha 0 is KL(second || first).
        anchor_BxR = compute_full_logit_self_distillation_loss(
            with_context_BxRxV, logits.student_logits.detach(), distillation_alpha=0.0
        )
        mask_BxR = logits.loss_mask
        anchor = ((anchor_BxR * mask_BxR).sum(-1) / mask_BxR.sum(-1)).mean()
        return loss + self.beta * anchor


def fed_digest(fed: dict[str, torch.Tensor]) -> str:
    """Of the rows without their padding: the prompts of both views, the responses."""
    R = fed["completion_ids"].shape[1]
    views = (
        (fed["prompt_ids"], fed["prompt_mask"]),
        (fed["teacher_input_ids"][:, :-R], fed["teacher_attention_mask"][:, :-R]),
    )
    rows = [ids[mask.bool()].tolist() for view in views for ids, mask in zip(*view, strict=True)]
    return digest([*rows, *fed["completion_ids"].tolist()])


class Trl:
    """The commands of this side.

    Args:
      directory: of the model.
      threads: that torch computes with.
    """

    def __init__(self, directory: str, threads: int):
        torch.set_num_threads(threads)
        self._directory = directory
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._trainer: TokenTrainer | None = None

    def about(self) -> dict:
        packages = {name: version(name) for name in ("torch", "transformers", "trl", "accelerate")}
        attention = self._model.config._attn_implementation
        return {
            "packages": packages,
            "threads": torch.get_num_threads(),
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "default"),
            "attention": attention,
            "compiles": False,
            "note": "SDFTTrainer's own training_step, then clipping and update; NCA is a subclass that adds the anchor",
        }

    def start_step(
        self, inputs: str, objective: str, beta: float, rollout: bool, recompute: bool, learning_rate: float
    ) -> dict:
        """Back to the initial parameters, with a new optimizer."""
        reset_peak()
        given = load_inputs(inputs)
        rows = range(len(given.prompt_length_B))
        if self._trainer is None:
            self._trainer = self._make_trainer(len(rows), given.response_BxR.shape[1], learning_rate)
        trainer = self._trainer
        trainer.ids = {str(i): ids for i, ids in enumerate(prompts(given, False))}
        trainer.ids |= {f"c{i}": ids for i, ids in enumerate(prompts(given, True))}
        trainer.responses = None if rollout else given.response_BxR.tolist()
        trainer.beta = beta if objective == "nca" else 0.0
        trainer.model.load_state_dict(trainer.teacher_model.state_dict())
        trainer.model.train()
        if recompute:
            trainer.model.gradient_checkpointing_enable()
        else:
            trainer.model.gradient_checkpointing_disable()
        trainer.optimizer = None
        trainer.create_optimizer()
        trainer.optimizer.zero_grad()
        self._rows = [{"prompt": str(i), "privileged_context": "c"} for i in rows]
        return {"digest": digest([*trainer.ids.values(), *given.response_BxR.tolist()])}

    def step(self) -> dict:
        """One step from what the one before has left."""
        trainer = self._trainer

        def run():
            loss = trainer.training_step(trainer.model, self._rows, None)
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            return loss.item()

        seconds, loss = timed(run)
        return {"seconds": seconds, "loss": loss, "peak_mb": peak_mb(), "fed": fed_digest(trainer.fed)}

    def start_sampling(self, inputs: str, rows: int, response: int) -> dict:
        """The prompts of the no-context view, of the first `rows` rows, padded to the left."""
        reset_peak()
        given = load_inputs(inputs)
        if self._trainer is not None:  # the model, back to its initial parameters
            self._model.load_state_dict(self._trainer.teacher_model.state_dict())
            self._model.gradient_checkpointing_disable()
            self._trainer = None
        self._model.eval()
        self._response = response
        self._prompts = self._tokenizer.pad(
            {"input_ids": prompts(given, False, rows)}, padding_side="left", return_tensors="pt"
        )
        all_rows = [*prompts(given, False), *prompts(given, True)]
        return {"digest": digest([*all_rows, *given.response_BxR.tolist()])}

    @torch.no_grad()
    def sample(self, temperature: float) -> dict:
        """`generate` with its default cache; no token ends a response, temperature 0 is greedy."""
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=self._response,
            min_new_tokens=self._response,
            pad_token_id=self._tokenizer.pad_token_id,
            **(drawn if temperature else {"do_sample": False}),
        )
        seconds, ids_BxT = timed(lambda: self._model.generate(**self._prompts, generation_config=config))
        response = ids_BxT[:, -self._response :].tolist()
        return {"seconds": seconds, "response": response, "peak_mb": peak_mb()}

    def _make_trainer(self, batch: int, response: int, learning_rate: float) -> TokenTrainer:
        args = SDFTConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=batch,
            num_generations=1,
            max_prompt_length=None,
            max_completion_length=response,
            generation_kwargs={"min_new_tokens": response},
            distillation_mode="full_logits",
            distillation_alpha=1.0,
            teacher_model_kind="base",
            teacher_prompt_template="{privileged_context}{prompt}",
            learning_rate=learning_rate,
            weight_decay=0.0,
            max_grad_norm=1.0,
        )
        rows = Dataset.from_list([{"prompt": str(i), "privileged_context": "c"} for i in range(batch)])
        trainer = TokenTrainer(model=self._model, args=args, train_dataset=rows, processing_class=self._tokenizer)
        trainer.current_gradient_accumulation_steps = 1  # what the trainer's loop sets
        return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", help="of the model")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    side = Trl(arguments.directory, arguments.threads)
    serve({name: getattr(side, name) for name in ("about", "start_step", "step", "start_sampling", "sample")})


if __name__ == "__main__":
    main()
