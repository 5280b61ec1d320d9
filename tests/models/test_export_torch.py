"""What is exported loads in transformers and computes the same. Runs where torch is installed, which nothing needs."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from flax import nnx

from nca_jax import convert
from nca_jax.models.architecture import load_architecture
from nca_jax.models.decoder import decoder_graph
from nca_jax.models.source import load_weights

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "smollm2"])
def test_transformers_loads_an_export_and_gives_the_golden_logits(family, tmp_path):
    from transformers import AutoModelForCausalLM

    imported, exported = tmp_path / "imported", tmp_path / "exported"
    assert convert.main(["import", f"--source={GOLDEN / family}", f"--output={imported}"]) == 0
    assert convert.main(["export", f"--source={imported}", f"--output={exported}", "--shard_gb=5e-5"]) == 0
    model, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    fixture = np.load(GOLDEN / family / "fixture.npz")
    with torch.no_grad():
        logits = model(torch.from_numpy(fixture["tokens"]).long()).logits.numpy()
    np.testing.assert_allclose(logits, fixture["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ["tiny_llama3", "tiny_qwen2_5", "tiny_qwen3", "tiny_smollm2"])
def test_transformers_and_we_agree_on_a_random_model(name, tmp_path):
    """A config written from a preset, weights in bfloat16, positions beyond the original context of the scaled rope."""
    from transformers import AutoModelForCausalLM

    assert convert.main(["random", f"--preset={name}", f"--output={tmp_path / 'model'}"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    arch = load_architecture(tmp_path / "model")
    params = load_weights(str(tmp_path / "model"), arch, jnp.float32)
    token_BxT = np.random.default_rng(0).integers(0, arch.vocab_size, (2, 24))
    position_BxT = np.array([np.arange(24), 9000 + np.arange(24)])
    hidden_BxTxD, _ = nnx.merge(decoder_graph(arch), params)(jnp.asarray(token_BxT), jnp.asarray(position_BxT))
    ours_BxTxV = hidden_BxTxD @ (params.get("head", params["embedding"])).T
    with torch.no_grad():
        theirs = model.float()(torch.from_numpy(token_BxT), position_ids=torch.from_numpy(position_BxT)).logits.numpy()
    np.testing.assert_allclose(ours_BxTxV, theirs, atol=1e-4)
