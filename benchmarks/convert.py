"""Peak host memory of importing and exporting a checkpoint of several GB, against the bytes of its parameters.

    python -m benchmarks.convert [--preset=llama3_2_3b] [--scratch=DIR]

Each command runs in a process of its own. On a CPU the mesh itself is host memory: an import cannot take less than the
parameters it holds; what counts is the rest. An export holds no model. Needs about six times the checkpoint in
disk, and the float32 parameters in memory. Results: benchmarks/results/convert.json.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from nca_jax.models.decoder import parameter_count
from nca_jax.models.huggingface import stored_names
from nca_jax.models.presets import preset

RESULTS = Path(__file__).parent / "results" / "convert.json"
DEVICES = 4  # simulated, for the import onto a mesh


def run(*arguments: str, devices: int = 1) -> dict[str, float]:
    """Seconds and peak GB of one conversion, as it prints them."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-m", "nca_jax.convert", *arguments]
    done = subprocess.run(command, env=os.environ | flags, text=True, capture_output=True, check=True)
    print(" ".join(command[2:]), done.stdout, sep="\n", flush=True)
    seconds, peak = re.search(r"^([\d.]+) s, peak memory ([\d.]+) GB$", done.stdout, re.MULTILINE).groups()
    return {"seconds": float(seconds), "peak_gb": float(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="llama3_2_3b")
    parser.add_argument("--scratch", help="directory on a disk with room; default: the system's")
    arguments = parser.parse_args()
    arch = preset(arguments.preset)
    parameters = parameter_count(arch)
    sizes = {
        "parameters": parameters,
        "float32_parameters_gb": 4 * parameters / 1e9,
        "checkpoint_gb": 2 * parameters / 1e9,
        "largest_tensor_gb": 4 * max(int(np.prod(stored.shape)) for stored in stored_names(arch)) / 1e9,
    }
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        path = Path(scratch)
        run("random", "--preset=tiny_qwen3", f"--output={path / 'tiny'}")
        runs = {
            "import of a tiny model": run("import", f"--source={path / 'tiny'}", f"--output={path / 'tiny_orbax'}"),
            "export of a tiny model": run("export", f"--source={path / 'tiny_orbax'}", f"--output={path / 'tiny_out'}"),
            "random": run("random", f"--preset={arguments.preset}", f"--output={path / 'model'}"),
            "import": run("import", f"--source={path / 'model'}", f"--output={path / 'orbax'}"),
            "export": run("export", f"--source={path / 'orbax'}", f"--output={path / 'out'}"),
            f"import, {DEVICES} devices": run(
                "import",
                f"--source={path / 'model'}",
                f"--output={path / 'orbax'}",
                "--overwrite",
                f"--mesh=fsdp={DEVICES // 2},tensor=2",
                devices=DEVICES,
            ),
        }
    for name in ("import", f"import, {DEVICES} devices"):
        runs[name]["peak_above_parameters_gb"] = round(runs[name]["peak_gb"] - sizes["float32_parameters_gb"], 2)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"preset": arguments.preset, **sizes, "runs": runs}, indent=2) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
