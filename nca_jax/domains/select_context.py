"""The command that compares contexts: each is tried on the validation items, and the best is written down.

    python -m nca_jax.domains.select_context --config=configs/medmcqa.py:llama3_2_3b \\
        --candidates own prompts/a.txt prompts/b.json --output=prompts/best.json

A candidate is a file as `--config.context.file=` takes, a name that the domain knows, or "own": the domain's own
context. All are tried on the same items with the same random numbers. Test items are never touched.
"""

import argparse
import sys
from collections.abc import Sequence

from etils import epath
from ml_collections import ConfigDict

from nca_jax.command import parse_with_config, set_up_logging
from nca_jax.data.chat import Context
from nca_jax.domains import make_domain
from nca_jax.domains.base import Domain, Probe, context_file, find_context
from nca_jax.errors import UserError
from nca_jax.evaluation import make_evaluator, summarise_view
from nca_jax.files import write_json
from nca_jax.session import open_session

OWN = "own"


def compare(config: ConfigDict, domain: Domain, candidates: dict[str, Context]) -> dict[str, dict[str, float]]:
    """Evaluates the model of a config on the validation items without a context and with each.

    Returns:
      "no_context" and each candidate -> `evaluate.summarise_view`.
    """
    config = config.copy_and_resolve_references()
    config.evaluation.split = "validation"
    config.evaluation.divergence = "none"
    session = open_session(config)
    probes = [Probe(name, context, domain.score) for name, context in candidates.items()]
    evaluator = make_evaluator(
        config,
        domain,
        session.chat,
        session.answering,
        session.decode,
        probes,
        prefix_multiple=config.data.length_multiple,
    )
    return {name: summarise_view(items) for name, items in evaluator(session.params).items()}


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as lines of text, the best first."""
    width = max(len(name) for name in results)
    lines = [f"{'context':{width}}  right      of  cut  no answer  tokens"]
    for name, found in sorted(results.items(), key=lambda pair: -pair[1]["accuracy"]):
        lines.append(
            f"{name:{width}}  {found['accuracy']:.3f}  {found['items']:6d}  {found['truncated']:.2f}"
            f"  {found['no_answer']:9.2f}  {found['length']:6.1f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.domains.select_context", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--candidates", nargs="+", required=True, help=f"files, names of the domain, or {OWN}")
    parser.add_argument("--output", required=True, help="the best context, a .json file")
    try:
        options, config, _ = parse_with_config(parser, arguments)
        output = epath.Path(options.output)
        if output.suffix != ".json":
            raise UserError(f"--output {output} must end in .json.")
        domain = make_domain(config.domain.name, **config.domain.settings)
        contexts = {name: domain.context if name == OWN else find_context(domain, name) for name in options.candidates}
        results = compare(config, domain, contexts)
        # The first of equals, in the order they were given.
        best = max(contexts, key=lambda name: results[name]["accuracy"])
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, [dict(message) for message in context_file(contexts[best])])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(results))
    print(f"{output}: the context of {best}; give it as --config.context.file")
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv[1:]))
