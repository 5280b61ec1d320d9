"""What all commands have in common: which messages are shown, and how a config is read from the command line."""

import argparse
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags

from nca_jax.errors import UserError


def set_up_logging() -> None:
    """Our own messages and everyone's warnings; the libraries' progress reports stay silent."""
    # transformers would say that it found no PyTorch, which is as it should be.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", force=True)
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("nca_jax").setLevel(logging.INFO)


def parse_with_config(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, ConfigDict, str]:
    """Reads a command line of the parser's own options, `--config=FILE[:SETTING]` and `--config.KEY=VALUE`.

    Args:
      parser: with `allow_abbrev=False`, or it would take others' options for its own.
      arguments: without the program's name.

    Returns:
      The options, the locked config, and "FILE[:SETTING]".

    Raises:
      UserError: an unknown option or key, a value of another type, or no config.
    """
    options, rest = parser.parse_known_args(arguments)
    # Flags of their own, so that several commands can live in one process.
    known = flags.FlagValues()
    argv = ["", *rest]
    holder = config_flags.DEFINE_config_file("config", lock_config=True, flag_values=known, sys_argv=argv)
    try:
        left = known(argv)
        config = holder.value
        if config is not None:
            config.keys()  # a file that could not be loaded says so only when it is used
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"the command line is wrong: {_reason(error, rest)}") from error
    if len(left) > 1:
        raise UserError(f"unexpected argument {left[1]!r}; options begin with --.")
    if config is None:
        raise UserError("--config is missing; try --config=configs/conventions.py.")
    return options, config, config_flags.get_config_filename(known["config"])


def config_label(name: str) -> str:
    """ "configs/medmcqa.py:tiny" -> "medmcqa_tiny", for directories that the same command finds again."""
    file, _, setting = name.partition(":")
    return "_".join(filter(None, [Path(file).stem, setting]))


def _reason(error: Exception, arguments: Sequence[str]) -> str:
    """config_flags raises each of these kinds for an unknown key or a value of another type."""
    lines = str(error.args[0] if error.args else error).strip().split("\n")
    reason = (lines[-1] if isinstance(error, OSError) or lines[0].endswith(":") else lines[0]).strip()
    if isinstance(error, (AttributeError, KeyError)):
        # The key is a word of the message, in one of several forms of quotes, perhaps with a suggestion behind it.
        given = [argument.split("=")[0] for argument in arguments]
        words = re.findall(r"\w+", reason)
        where = next((a for word in words for a in given if f".{word}" in a), reason)
        reason = f"the config has no key {where}; configs/base.py lists them all."
    return reason
