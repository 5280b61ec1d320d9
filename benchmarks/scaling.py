"""How cost grows: with batch, lengths, layers and vocabulary on this machine, and with the mesh in compiled programs.

    JAX_PLATFORMS=cpu python -m benchmarks.scaling [--only=time|limits|communication] [--sizes=batch,layers]
    python -m benchmarks.scaling --table | --figure

time: the NCA step and a decoded token of a small random model while one size varies at a time. Compilation is apart.
limits: the same of SmolLM2-135M, as shares of the machine's measured rate of matrix products and bandwidth of memory.
communication: bytes that a device receives in a step, by kind of collective, read from compiled programs: on simulated
  devices of this machine, and for TPU topologies of 8 to 4096 chips by the TPU's own compiler (needs libtpu). What the
  results hold already is not compiled again, unless --again.

Results: benchmarks/results/scaling.json, each part under its own key. The figure: docs/scaling_time.png.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from etils import epath

from benchmarks import machine, scaling_mesh
from benchmarks.scaling_time import (
    MODEL_POINTS,
    SWEEPS,
    Sizes,
    floor_seconds,
    growth,
    model_point,
    reached,
    sweep,
)
from nca_jax.models.presets import preset
from nca_jax.plotting import INK, new_figure, save, series, title

RESULTS = Path(__file__).parent / "results" / "scaling.json"
FIGURE = Path(__file__).parents[1] / "docs" / "scaling_time.png"


def with_limits(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, and the machine's limits, the higher ones of before and after it."""
    before = machine.limits()
    found = measure()
    after = machine.limits()
    highest = {unit: max(before[unit], after[unit]) for unit in before}
    return found | {
        "limits": highest,
        "limits before and after": [before, after],
        "machine": machine.description(),
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
    }


def measure_time(name: str, repeats: int) -> dict[str, Any]:
    """The sweep of one size, with how step and decode grow."""
    found = with_limits(lambda: sweep(name, SWEEPS[name], repeats))
    for what in ("step", "decode"):
        found[f"growth of {what}"] = growth(found["sizes"], found[what], found["limits"])
    return found | {"base": Sizes()._asdict(), "repeats": repeats}


def measure_limits(what: str, batch: int, context: int, repeats: int) -> dict[str, Any]:
    """A step or a decode of SmolLM2-135M, with what the machine can do."""
    return with_limits(lambda: model_point(what, batch, context, repeats)) | {"repeats": repeats}


def time_table(found: Mapping[str, Any]) -> str:
    """A row for each size and what was timed; `found` has a sweep for each."""
    lines = [
        "| size | from, to | what | slope | by FLOPs | at the limits | ms for 1 more | ms at 0 | of the matrix rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, swept in found.items():
        for what in ("step", "decode"):
            grown, points = swept[f"growth of {what}"], swept[what]
            shares = [reached(point, swept["limits"])["share of GFLOP/s"] for point in points]
            cells = [
                name,
                f"{swept['sizes'][0]}, {swept['sizes'][-1]}",
                {"step": "NCA step", "decode": "a token of every row"}[what],
                *(f"{grown[kind]:.2f}" for kind in ("slope", "slope of FLOPs", "slope at the limits")),
                f"{1e3 * grown['line']['per unit']:.3g}",
                f"{1e3 * grown['line']['fixed']:.3g}",
                f"{shares[0]:.0%}, {shares[-1]:.0%}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def limits_table(found: Mapping[str, Any]) -> str:
    """A row for each step and decode of SmolLM2-135M."""
    lines = [
        "| what | batch | context | seconds | GFLOP | GFLOP/s | of the matrix rate | GB | GB/s | of the bandwidth |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"].values():
        rates = reached(row, row["limits"])
        read = ["", "", ""]
        if "bytes" in row:
            read = [f"{1e-9 * row['bytes']:.2f}", f"{rates['GB/s']:.1f}", f"{rates['share of GB/s']:.0%}"]
        cells = [
            {"step": "NCA step", "decode": "a token of every row"}[row["what"]],
            row["batch"],
            row["context"],
            f"{row['seconds']:.3f}",
            f"{1e-9 * row['FLOPs']:.4g}",
            f"{rates['GFLOP/s']:.1f}",
            f"{rates['share of GFLOP/s']:.0%}",
            *read,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def draw_figure(found: Mapping[str, Any]):
    """A panel for each size: seconds of a step and of a token, and what the machine's limits leave of them."""
    names = {"step": "NCA step", "decode": "one token of every row"}
    figure, panels = new_figure(11, 2.9, 1, len(found), sharey=True, squeeze=False)
    panels = panels[0]
    for axes, (name, swept) in zip(panels, found.items(), strict=True):
        for i, (what, label) in enumerate(names.items()):
            axes.plot(swept["sizes"], [point["seconds"] for point in swept[what]], label=label, **series(i))
            least = [floor_seconds(point, swept["limits"]) for point in swept[what]]
            plain = series(i) | {"marker": "", "linestyle": ":", "linewidth": 1.2}
            axes.plot(swept["sizes"], least, label=f"{label}, at the limits", **plain)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(swept["sizes"], [str(size) for size in swept["sizes"]], rotation=45)
        axes.minorticks_off()
        axes.set_xlabel(name)
    panels[0].set_ylabel("seconds", color=INK)
    title(panels[0], "cost against one size at a time")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


def tables(results: Mapping[str, Any]) -> str:
    """All that is in the results, as docs/performance.md shows it."""
    parts = []
    if "limits" in results:
        found = results["limits"]
        parts += [
            "The machine:",
            machine.table(found["measured"]),
            "SmolLM2-135M:",
            limits_table(found),
            _about(list(found["rows"].values())),
        ]
    if "time" in results:
        found = results["time"]
        base = ", ".join(f"{name} {value}" for name, value in next(iter(found.values()))["base"].items())
        parts += [f"The small model; the base: {base}.", time_table(found), _about(list(found.values()))]
    if "communication" in results:
        parts += ["Communication:", scaling_mesh.table(results["communication"])]
    return "\n\n".join(parts)


def _about(found: Sequence[Mapping[str, Any]]) -> str:
    """Where and against which limits some parts were measured."""

    def span(unit: str) -> str:
        low, high = (f"{of(part['limits'][unit] for part in found):.0f}" for of in (min, max))
        return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"

    rounds, machines = ({part[name] for part in found} for name in ("repeats", "machine"))
    return (
        f"(Limits measured before and after: {span('GFLOP/s')}, {span('GB/s')}. Medians of {min(rounds)} rounds. "
        f"{'; '.join(sorted(machines))}.)"
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("time", "limits", "communication"), help="the other parts are kept")
    parser.add_argument("--sizes", default=",".join(SWEEPS), help="which are varied; the others' results are kept")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds, after one to warm up")
    parser.add_argument("--again", action="store_true", help="compile also what is in the results already")
    parser.add_argument("--table", action="store_true", help="only print the results in Markdown")
    parser.add_argument("--figure", action="store_true", help="only draw the figure of the results")
    options = parser.parse_args(arguments)
    if unknown := set(options.sizes.split(",")) - SWEEPS.keys():
        parser.error(f"--sizes: there is no {', '.join(sorted(unknown))}; choose of {', '.join(SWEEPS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def keep(part: str, found: Any) -> None:
        results[part] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")

    if not options.table and not options.figure:
        parts = [options.only] if options.only else ["time", "limits", "communication"]
        if "time" in parts:
            for name in options.sizes.split(","):
                swept = measure_time(name, options.repeats)
                known = results.get("time", {}) | {name: swept}
                keep("time", {size: known[size] for size in SWEEPS if size in known})
        if "limits" in parts:
            keep(
                "limits",
                results.get("limits", {"rows": {}}) | {"measured": machine.measure(preset("smollm2_135m"), tokens=512)},
            )
            for point in MODEL_POINTS:
                row = measure_limits(*point, options.repeats)
                keep("limits", results["limits"] | {"rows": results["limits"]["rows"] | {str(point): row}})
        if "communication" in parts:
            known = {} if options.again else results.get("communication", {})
            scaling_mesh.measure(known, lambda found: keep("communication", found))
    if not options.table and "time" in results:
        save(draw_figure(results["time"]), epath.Path(FIGURE))
    if not options.figure:
        print(tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
