"""The command: `python -m nca_jax.main --config=configs/conventions.py [--workdir=DIR] [--config.a.b=VALUE ...]`."""

import argparse
import sys
from collections.abc import Sequence

from nca_jax.command import config_label, parse_with_config, set_up_logging
from nca_jax.errors import UserError


def main(arguments: Sequence[str]) -> int:
    """Runs the job; returns the exit code: 0, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.main",
        description="Trains: --config=FILE[:SETTING] and --config.KEY=VALUE say what, configs/base.py lists the keys.",
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", help="written to and resumed from; default: runs/<config>_<setting>_<method>")
    try:
        options, config, name = parse_with_config(parser, arguments)
        from nca_jax import settings, train  # jax starts only once the flags are right

        workdir = options.workdir or f"runs/{config_label(name)}_{settings.method_name(config)}"
        print(train.train(config, workdir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv[1:]))
