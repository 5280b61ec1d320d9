"""The smallest TPU slice that each of the twelve reference settings fits, as compiled; needs libtpu and an hour or two.

    python -m benchmarks.fit_table            # compiles what is not in the results yet
    python -m benchmarks.fit_table --table    # prints the table of what is there

For every setting and chip, slices are tried from the smallest on which the weights, the optimizer's state and the
teacher alone would fit; those below it need no compiler. Prompts, contexts and responses are the longest that the
config lets pass, and attention is splash. Results go to benchmarks/results/fit.json after every compilation.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from nca_jax.chips import chip_named
from nca_jax.models.decoder import parameter_count
from nca_jax.models.presets import preset
from nca_jax.plan import SHAPES

RESULTS = Path(__file__).parent / "results" / "fit.json"
CHIPS = ("v5e", "v6e", "v5p")
# Setting -> (student, teacher). Safety's settings are the programs of MedMCQA's.
SETTINGS = {
    "medmcqa:llama3_2_3b": ("llama3_2_3b", "llama3_2_3b"),
    "medmcqa:llama3_1_8b": ("llama3_1_8b", "llama3_1_8b"),
    "medmcqa:qwen2_5_7b": ("qwen2_5_7b", "qwen2_5_7b"),
    "medmcqa:qwen3_8b": ("qwen3_8b", "qwen3_8b"),
    "safety:llama3_2_3b": ("llama3_2_3b", "llama3_2_3b"),
    "safety:llama3_1_8b": ("llama3_1_8b", "llama3_1_8b"),
    "safety:qwen2_5_7b": ("qwen2_5_7b", "qwen2_5_7b"),
    "safety:qwen3_8b": ("qwen3_8b", "qwen3_8b"),
    "frozenlake:self": ("qwen3_1_7b", "qwen3_1_7b"),
    "frozenlake:cross": ("qwen3_1_7b", "qwen3_4b"),
    "sokoban:self": ("qwen3_4b_2507", "qwen3_4b_2507"),
    "sokoban:cross": ("qwen3_4b", "qwen3_8b"),
}


def static_bytes(setting: str) -> float:
    """Of all devices together: float32 weights and two moments, and a bfloat16 teacher."""
    student, teacher = (parameter_count(preset(name)) for name in SETTINGS[setting])
    return 12 * student + 2 * teacher


def plan(setting: str, topology: str) -> dict:
    """What `nca_jax.plan --json` says, without the long lists."""
    domain, name = setting.split(":")
    command = [sys.executable, "-m", "nca_jax.plan", f"--config=configs/{domain}.py:{name}", f"--topology={topology}"]
    done = subprocess.run([*command, "--json", "--search=0"], capture_output=True, text=True, check=False)
    if done.returncode == 2 and "do not divide over" in done.stderr:  # more devices than rows
        return {"fits": False, "needs": {}, "refused": done.stderr.strip().split("\n")[-1]}
    if not done.stdout:
        raise RuntimeError(done.stderr[-3000:])
    found = json.loads(done.stdout)
    kept = ("fits", "limit", "needs", "meshes", "micro_batches", "tokens", "seconds", "chips")
    seconds = {name: program["compile_seconds"] for name, program in found["programs"].items()}
    kernels = {name: program.get("kernels") for name, program in found["programs"].items()}
    return {key: found[key] for key in kept} | {"compile_seconds": seconds, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="only print")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.table:
        for chip in CHIPS:
            for setting in SETTINGS:
                search(setting, chip, results)
    print(table(results))


def search(setting: str, chip: str, results: dict) -> None:
    """Tries slices until one fits; what is in the results is not compiled again."""
    for shape in SHAPES[chip]:
        topology, devices = f"{chip}:{shape}", math.prod(map(int, shape.split("x")))
        if static_bytes(setting) / devices > chip_named(chip).hbm_bytes:
            continue
        key = f"{setting} {topology}"
        if key not in results:
            results[key] = plan(setting, topology)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(key, "fits" if results[key]["fits"] else "does not fit", flush=True)
        if results[key]["fits"]:
            return


def table(results: dict) -> str:
    """Markdown: setting and the smallest slice of each chip, with the fullest program's GiB a device."""
    lines = ["| setting | " + " | ".join(CHIPS) + " |", "|---|" + "---|" * len(CHIPS)]
    for setting in SETTINGS:
        cells = []
        for chip in CHIPS:
            fitting = [
                (key.split(":")[-1], found)
                for key, found in results.items()
                if key.startswith(f"{setting} {chip}:") and found["fits"]
            ]
            if not fitting:
                cells.append("")
                continue
            shape, found = fitting[0]
            seconds = sum(program["total"] for program in found["seconds"].values())
            peak, limit = max(found["needs"].values()) / 2**30, found["limit"] / 2**30
            cells.append(f"{shape}: {peak:.1f} of {limit:.1f} GiB, {seconds:.0f} s")
        lines.append(f"| `{setting}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
