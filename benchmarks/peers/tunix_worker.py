"""google-tunix's side: its sampler, on its Llama 3, and its logit strategy.

Of SmolLM2 that model has the shapes, and so the time; but it takes 1,000,000 for the base of its rotary embeddings
whatever its configuration says, and so the tokens are others (with that base nca_jax draws the same ones).
"""

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import ModelConfig
from tunix.models.llama3.params import create_model_from_safe_tensors

from benchmarks.peers.inputs import HEADER, PROMPT, digest, load_inputs, load_positions, prompts
from benchmarks.peers.worker import peak_mb, reset_peak, serve, timed


class GivenIds:
    """In place of a tokenizer: the text "3" is the third row. There is no BOS, and 0 pads."""

    def __init__(self):
        self.rows: list[list[int]] = []

    def encode(self, text: str) -> list[int]:
        return self.rows[int(text)]

    def decode(self, ids: list[int]) -> str:
        return str(len(ids))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return 0

    def pad_id(self) -> int:
        return 0


class Tunix:
    """The commands of this side.

    Args:
      directory: of a model with the architecture of Llama.
      response: the longest response, which the cache is made for.
    """

    def __init__(self, directory: str, response: int):
        config = json.loads((Path(directory) / "config.json").read_text())
        architecture = ModelConfig(
            num_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            embed_dim=config["hidden_size"],
            hidden_dim=config["intermediate_size"],
            num_heads=config["num_attention_heads"],
            head_dim=config["head_dim"],
            num_kv_heads=config["num_key_value_heads"],
            rope_theta=int(config["rope_theta"]),
            norm_eps=config["rms_norm_eps"],
            weight_tying=config["tie_word_embeddings"],
        )
        model = create_model_from_safe_tensors(directory, architecture, dtype=jnp.float32)
        self._prompt, self._vocab_size = HEADER + PROMPT[1], config["vocab_size"]
        cache = CacheConfig(
            cache_size=self._prompt + response,
            num_layers=architecture.num_layers,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
        )
        self._ids = GivenIds()
        self._sampler = Sampler(model, self._ids, cache)
        self._compilations, self._seed = 0, 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, _: float, **__) -> None:
        self._compilations += event.endswith("backend_compile_duration")

    def about(self) -> dict:
        packages = {name: version(name) for name in ("google-tunix", "jax", "flax")}
        note = "its Llama 3 (0.1.7) ignores rope_theta: other tokens, the same work"
        return {"packages": packages, "backend": jax.default_backend(), "compiles": True, "note": note}

    def start_sampling(self, inputs: str, rows: int, response: int) -> dict:
        """The prompts of the no-context view, of the first `rows` rows."""
        reset_peak()
        given = load_inputs(inputs)
        self._ids.rows, self._response = prompts(given, False, rows), response
        all_rows = [*prompts(given, False), *prompts(given, True)]
        return {"digest": digest([*all_rows, *given.response_BxR.tolist()])}

    def sample(self, temperature: float) -> dict:
        """Draws a response for every row; no token ends one, temperature 0 is greedy."""
        before = self._compilations
        self._seed += 1
        # With top_p it samples, and at 1 it sorts nothing; without, it is greedy.
        how = {"temperature": temperature, "top_p": 1.0} if temperature else {}
        seconds, drawn = timed(
            lambda: self._sampler(
                [str(i) for i in range(len(self._ids.rows))],
                max_generation_steps=self._response,
                max_prompt_length=self._prompt,
                eos_tokens=[self._vocab_size],
                seed=self._seed,
                **how,
            )
        )
        response = [jax.device_get(row).tolist() for row in drawn.tokens]
        compiled = self._compilations - before
        return {"seconds": seconds, "response": response, "peak_mb": peak_mb(), "compilations": compiled}

    def start_loss(self, positions: str) -> dict:
        """The strategy's loss with alpha 1 and temperature 1, KL(teacher || student) averaged over the positions, with
        its gradient for hidden states and head. Its cross-entropy, which then has weight 0, is computed all the same.
        """
        reset_peak()
        given = load_positions(positions)
        student, teacher, head, token_N = (jnp.asarray(x) for x in given)
        strategy = LogitStrategy(lambda *_: None, lambda *_: None, lambda *_: None, temperature=1.0, alpha=1.0)

        # All are arguments: of constants the compiler would compute what follows from them once for all.
        def loss(student_NxD, head_VxD, teacher_NxD, teacher_head_VxD, token_N):
            logits_NxV, teacher_NxV = student_NxD @ head_VxD.T, teacher_NxD @ teacher_head_VxD.T
            labels_NxV = jax.nn.one_hot(token_N, len(head_VxD))
            return strategy.compute_loss(logits_NxV, teacher_NxV, labels_NxV)[0]

        arguments = (student, head, teacher, head, token_N)
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        self._loss = lambda: jax.block_until_ready(compiled(*arguments))
        return {"temporary_mb": compiled.memory_analysis().temp_size_in_bytes // 10**6}

    def loss(self) -> dict:
        seconds, (value, _) = timed(self._loss)
        return {"seconds": seconds, "loss": float(value), "peak_mb": peak_mb()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", help="of the model")
    parser.add_argument("--response", type=int, required=True)
    arguments = parser.parse_args()
    side = Tunix(arguments.directory, arguments.response)
    serve({name: getattr(side, name) for name in ("about", "start_sampling", "sample", "start_loss", "loss")})


if __name__ == "__main__":
    main()
