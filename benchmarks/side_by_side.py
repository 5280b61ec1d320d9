"""The same steps and samples by nca_jax and by its peers: ratios of times, taken in turn in one run on this machine.

    bash benchmarks/setup.sh
    JAX_PLATFORMS=cpu python -m benchmarks.side_by_side [--quick] [--contexts=64,512,2048] [--parts=step,sampling]
    python -m benchmarks.side_by_side --table

Every side is a process of its own (`benchmarks/peers/`) with the same model in float32, the same token ids and as many
threads. They take turns, one repetition each, and wait while another works. The first repetition of a process that
compiles is apart, and so is the first of all of one that does not. From a context of RECOMPUTE_FROM tokens on both
sides compute the layers anew in the backward pass, for TRL would need more memory than a laptop has; below that TRL
keeps everything and ours (`remat=dots`, which measured fastest) all but what is cheap to compute.

Results: benchmarks/results/side_by_side.json; a row that is measured again replaces the old one. Rows marked "busy"
were measured while others used the machine, and their times say nothing.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers import inputs as fed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "side_by_side.json"
BATCH, RESPONSE, BETA, LEARNING_RATE, RECOMPUTE_FROM = 8, 32, 0.5, 1e-5, 1024
SAMPLED_BATCHES = (1, 8, 32)
TOLERANCE = 1e-4  # of losses on the same tokens
# Of the batches for which compilations are counted, each with prompts of other lengths.
TEMPERATURES = (1.0, 0.7, 1.0, 0.5, 0.9, 1.2, 0.8, 0.6)
KEY = ("part", "model", "context", "objective", "rollout", "batch", "positions", "against")


class Side:
    """A process that answers requests, one at a time.

    Args:
      name: for messages.
      command: that starts it.
      environment: variables on top of this process's.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name = name
        # Programs are compiled by this run and not read from a cache of an earlier one.
        inherited = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=inherited | environment,
        )
        self.about = self.ask("about")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """What the command returns.

        Raises:
          RuntimeError: the command failed, or the process has ended.
        """
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name}: the process has ended with code {self._process.wait()} in {do!r}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {do!r} failed:\n{answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def in_turn(sides: Sequence[Side], repeats: int, do: str, warm: set[str], **arguments: Any) -> dict[str, list[dict]]:
    """One repetition of each side after the other, in an order that is reversed from round to round.

    Args:
      sides: at least two.
      repeats: rounds, after one to warm up.
      do: the command to repeat, with `arguments`.
      warm: names of sides that sit out the round to warm up.

    Returns:
      Side name -> its answers, of warm sides one less than of the others.
    """
    answers: dict[str, list[dict]] = {side.name: [] for side in sides}
    for i in range(repeats + 1):
        for side in sides if i % 2 else sides[::-1]:
            if i or side.name not in warm:
                answers[side.name].append(side.ask(do, **arguments))
    return answers


def compared(answers: Mapping[str, Sequence[Mapping[str, Any]]], repeats: int) -> dict[str, Any]:
    """What the last `repeats` answers of each side say about time and memory.

    "times faster" is, of every side but "ours", the median over the rounds of its seconds / ours: a machine that is
    busy for a while distorts that less than a ratio of medians.
    """
    seconds = {name: [a["seconds"] for a in given[-repeats:]] for name, given in answers.items()}
    ratios = {
        name: statistics.median(theirs / ours for theirs, ours in zip(values, seconds["ours"], strict=True))
        for name, values in seconds.items()
        if name != "ours"
    }
    firsts = {name: round(given[0]["seconds"], 3) for name, given in answers.items() if len(given) > repeats}
    return {
        "times faster": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "median seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "seconds": {name: [round(s, 3) for s in values] for name, values in seconds.items()},
        "first seconds, compilation included": firsts,
        "peak MB": {name: given[-1]["peak_mb"] for name, given in answers.items()},
    }


def agreement(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of the losses of successive steps from the same parameters: the first says whether both sides compute the same
    loss, the later ones whether gradient and update are the same too. The steps that both sides have done count."""
    ours, theirs = losses.values()
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
    return {
        "losses": {name: list(values) for name, values in losses.items()},
        "difference of the first losses": differences[0],
        "largest difference": max(differences),
        "losses agree": differences[0] <= TOLERANCE,
    }


def same_tokens(answers: Iterable[Mapping[str, Any]]) -> str:
    """The one digest that all sides have reported.

    Raises:
      RuntimeError: they were fed different tokens.
    """
    digests = {answer[name] for answer in answers for name in ("digest", "fed") if answer.get(name)}
    if len(digests) != 1:
        raise RuntimeError(f"the sides were fed different tokens: {digests}")
    return digests.pop()


def merged(rows: Iterable[Mapping[str, Any]], new: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows with `new` in place of the one that measured the same, in order."""

    def key(row):
        return [str(row.get(name, "")) for name in KEY]

    def order(row):
        return [str(row.get("part")), str(row.get("model"))] + [int(row.get(k) or 0) for k in ("context", "batch")]

    return sorted([row for row in rows if key(row) != key(new)] + [new], key=order)


def table(result: Mapping[str, Any]) -> str:
    """The rows in Markdown."""
    lines = [
        "| what | context | batch | against | times faster | seconds, ours | theirs | peak MB, ours | theirs |"
        " difference of losses |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        what = {"step": f"{row.get('objective', '').upper()} step", "sampling": "sampling", "loss": "loss alone"}
        name = what.get(row["part"])
        if name is None or "times faster" not in row:
            continue
        if row["part"] == "step" and row["rollout"]:
            name += " with rollout"
        for other, ratio in row["times faster"].items():
            seconds, peak = row["median seconds"], row["peak MB"]
            difference = row.get("difference of the first losses")
            cells = [
                f"{name}, {row['model']}" + (" (on a busy machine)" if row.get("busy") else ""),
                row.get("context", ""),
                row.get("batch", ""),
                other,
                ratio,
                seconds["ours"],
                seconds[other],
                peak["ours"],
                peak[other],
                "" if difference is None else f"{difference:.1e}",
            ]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    for row in result["rows"]:
        if row["part"] == "compilations":
            lines.append(f"\nPrograms compiled, batch after batch ({row['model']}): {row['compilations']}")
    return "\n".join(lines)


class Comparison:
    """One run of the driver.

    Args:
      model: its name in the results.
      directory: of the model.
      arguments: of the command line.
      folder: for the files that the sides read.
    """

    def __init__(self, model: str, directory: Path, arguments: argparse.Namespace, folder: Path):
        self._model, self._directory, self._arguments, self._folder = model, directory, arguments, folder
        self._vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
        self._warm: set[str] = set()
        threads = str(arguments.threads)
        environment = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
        }

        def side(name: str, python: str, *extra: str) -> Side:
            module = f"benchmarks.peers.{'ours' if name == 'ours' else name + '_worker'}"
            return Side(name, [python, "-m", module, str(directory), *extra], environment)

        self._ours = side("ours", sys.executable)
        self._trl = side("trl", arguments.peers, f"--threads={threads}")
        self._tunix, self._left_out = None, ""
        if not {"sampling", "loss"} & set(arguments.parts.split(",")):
            pass  # it takes no part in steps
        elif not Path(arguments.tunix).exists():
            self._left_out = "no environment for it"
        elif "llama" not in json.loads((directory / "config.json").read_text())["model_type"]:
            self._left_out = "its worker builds models of the Llama architecture only"
        else:
            self._tunix = side("tunix", arguments.tunix, f"--response={RESPONSE}")

    def run(self) -> None:
        """All parts that were asked for."""
        parts = self._arguments.parts.split(",")
        if "sampling" in parts:
            self._compilations()
            for batch in SAMPLED_BATCHES[: 2 if self._arguments.quick else None]:
                self._sampling(batch)
        if "loss" in parts and self._tunix:
            self._loss()
        if self._tunix:
            self._tunix.close()  # gives its memory back
            self._tunix = None
        for context in map(int, self._arguments.contexts.split(",")):
            for part, rollout in (("step", False), ("rollout", True)):
                if part in parts:
                    for objective in self._arguments.objectives.split(","):
                        self._step(context, objective, rollout)
        self._ours.close()
        self._trl.close()

    def _inputs(self, context: int, batch: int = BATCH, seed: int = 0) -> str:
        path = self._folder / f"inputs_{context}_{batch}_{seed}.npz"
        fed.save(path, fed.make_inputs(self._vocab_size, batch, context, RESPONSE, seed))
        return str(path)

    def _step(self, context: int, objective: str, rollout: bool) -> None:
        settings = {
            "objective": objective,
            "beta": BETA,
            "rollout": rollout,
            "recompute": context >= RECOMPUTE_FROM,
            "learning_rate": LEARNING_RATE,
        }
        sides = [self._ours, self._trl]
        started = [side.ask("start_step", inputs=self._inputs(context), **settings) for side in sides]
        repeats = self._arguments.repeats
        answers = in_turn(sides, repeats, "step", self._warm)
        self._warm.add("trl")
        row = {
            "context": context,
            "batch": BATCH,
            "response": RESPONSE,
            **settings,
            "tokens": same_tokens([*started, *([] if rollout else answers["trl"])]),
            **compared(answers, repeats),
        }
        if not rollout:
            row |= agreement({name: [a["loss"] for a in given] for name, given in answers.items()})
        self._report("step", row)

    def _samplers(self) -> list[Side]:
        return [self._ours, self._trl, *([self._tunix] if self._tunix else [])]

    def _sampling(self, batch: int) -> None:
        sides, given = self._samplers(), self._inputs(64, batch)
        started = [side.ask("start_sampling", inputs=given, rows=batch, response=RESPONSE) for side in sides]
        greedy = {side.name: side.ask("sample", temperature=0.0)["response"] for side in sides}
        repeats = self._arguments.repeats
        answers = in_turn(sides, repeats, "sample", set(), temperature=1.0)
        row = {"batch": batch, "response": RESPONSE, "tokens": same_tokens(started), **compared(answers, repeats)}
        row["tokens a second"] = {
            name: round(batch * RESPONSE / seconds, 1) for name, seconds in row["median seconds"].items()
        }
        row["share of greedy tokens equal to ours"] = {
            name: _share_equal(greedy["ours"], tokens) for name, tokens in greedy.items() if name != "ours"
        }
        self._report("sampling", row)

    def _compilations(self) -> None:
        """Programs compiled while batches of other prompt lengths and temperatures come one after the other."""
        sides = [side for side in self._samplers() if side.about["compiles"]]
        counts: dict[str, list[int]] = {side.name: [] for side in sides}
        for seed, temperature in enumerate(TEMPERATURES):
            given = self._inputs(64, BATCH, seed)
            for side in sides:
                side.ask("start_sampling", inputs=given, rows=BATCH, response=RESPONSE)
                counts[side.name].append(side.ask("sample", temperature=temperature)["compilations"])
        total = {name: sum(values) for name, values in counts.items()}
        self._report("compilations", {"batch": BATCH, "compilations": counts, "in all": total})

    def _loss(self) -> None:
        positions = 512
        path = self._folder / "positions.npz"
        width = json.loads((self._directory / "config.json").read_text())["hidden_size"]
        fed.save(path, fed.make_positions(positions, width, self._vocab_size))
        sides = [self._ours, self._tunix]
        temporary = {side.name: side.ask("start_loss", positions=str(path))["temporary_mb"] for side in sides}
        repeats = self._arguments.repeats
        answers = in_turn(sides, repeats, "loss", set())
        row = {"positions": positions, "temporary MB": temporary, **compared(answers, repeats)}
        row |= agreement({name: [a["loss"] for a in given] for name, given in answers.items()})
        self._report("loss", row)

    def _report(self, part: str, row: Mapping[str, Any]) -> None:
        """Prints the row and writes it, so that a run that is stopped leaves what it has measured."""
        row = {"part": part, "model": self._model, **row}
        row["measured"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        row["load average"] = [round(x, 1) for x in os.getloadavg()]
        # One side at work makes a load of `threads`. Others beside it hit libraries unequally: OpenMP's threads wait
        # for one another at every operation.
        row["busy"] = row["load average"][0] > self._arguments.threads + 1
        print(json.dumps(row), flush=True)
        if self._arguments.quick:
            return
        old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "sides": {}}
        sides = {side.name: side.about for side in self._samplers()}
        result = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
            "dtype": "float32",
            "threads": self._arguments.threads,
            "sides": old["sides"] | sides,
            "left out": old.get("left out", {}) | ({f"tunix, {self._model}": self._left_out} if self._left_out else {}),
            "rows": merged(old["rows"], row),
        }
        temporary = RESULTS.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(RESULTS)


def _share_equal(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    pairs = [a == b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return round(sum(pairs) / len(pairs), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one context, 2 repetitions, and nothing is written")
    parser.add_argument("--contexts", default="64,512,2048", help="tokens of the shared context")
    parser.add_argument(
        "--parts", default="sampling,loss,step,rollout", help="rollout: steps that draw their responses"
    )
    parser.add_argument("--objectives", default="opd,nca", help="of the steps")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions of each side")
    parser.add_argument("--threads", type=int, default=2, help="cores of each side")
    parser.add_argument("--model", default="smollm2_135m_instruct", help="or tiny_qwen3, with random weights")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers/bin/python"), help="Python with TRL")
    parser.add_argument("--tunix", default=str(ROOT / ".venv-tunix/bin/python"), help="Python with tunix, if any")
    parser.add_argument("--table", action="store_true", help="only prints the results that there are as Markdown")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    if arguments.quick:
        arguments.contexts, arguments.repeats = "64", 2
    if hasattr(os, "sched_setaffinity"):  # inherited by the sides: XLA would take all cores that there are
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])

    # The driver needs no jax: only for the model's directory, which a first run makes.
    from nca_jax.models.random_model import tiny_model
    from nca_jax.models.source import resolve

    tiny = arguments.model.startswith("tiny_")
    directory = Path(tiny_model(arguments.model) if tiny else resolve(arguments.model))
    with tempfile.TemporaryDirectory() as folder:
        Comparison(arguments.model, directory, arguments, Path(folder)).run()
    if not arguments.quick:
        result = json.loads(RESULTS.read_text())
        print(table(result))
        apart = [row for row in result["rows"] if not row.get("losses agree", True)]
        if apart:
            sys.exit(f"error: losses differ by more than {TOLERANCE} in {len(apart)} rows of {RESULTS}")


if __name__ == "__main__":
    main()
