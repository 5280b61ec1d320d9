"""The command: `python -m nca_jax.main --config=configs/conventions.py [--workdir=DIR] [--config.a.b=VALUE ...]`."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from nca_jax.command import config_label, parse_with_config, set_up_logging
from nca_jax.errors import RETRY_EXIT_CODE, Preempted, UserError


def main(arguments: Sequence[str]) -> int:
    """Runs the job; returns the exit code: 0; 2 for input that cannot work; 75 for a job that the same command
    continues, as a signal has stopped it."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.main",
        description="Trains: --config=FILE[:SETTING] and --config.KEY=VALUE say what, configs/base.py lists the keys. "
        "On several hosts the same command runs on each.",
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", help="written to and resumed from; default: runs/<config>_<setting>_<method>")
    try:
        options, config, name = parse_with_config(parser, arguments)
        from nca_jax import processes, settings, train  # jax is imported only once the flags are right

        processes.join()
        workdir = options.workdir or f"runs/{config_label(name)}_{settings.method_name(config)}"
        summary = train.train(config, workdir)
        if processes.is_first():
            print(summary)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Preempted as stopped:
        print(stopped, file=sys.stderr)
        return RETRY_EXIT_CODE
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process. After a failure one of several does not wait for the others, as Python's way out would: jax
    and Orbax have threads that meet them at barriers."""
    jax = sys.modules.get("jax")  # not imported yet where the flags are wrong
    if code not in (0, RETRY_EXIT_CODE) and jax and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    set_up_logging()
    try:
        leave(main(sys.argv[1:]))
    except Exception:
        traceback.print_exc()
        leave(1)
