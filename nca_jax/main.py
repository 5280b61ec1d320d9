"""The command: `python -m nca_jax.main --config=configs/conventions.py [--workdir=DIR] [--config.a.b=VALUE ...]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from nca_jax.command import set_up_logging
from nca_jax.errors import UserError

_CONFIG = config_flags.DEFINE_config_file("config", lock_config=True, help_string="file[:setting] with get_config().")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "where everything is written and resumed from; default: runs/<config>_<setting>_<method>."
)


def main(argv: Sequence[str]) -> int:
    """Runs the job; returns the exit code: 0, or 2 for input that cannot work."""
    try:
        _parse(argv)
        from nca_jax import settings, train  # jax starts only once the flags are right

        workdir = _WORKDIR.value or _default_workdir(settings.method_name(_CONFIG.value))
        print(train.train(_CONFIG.value, workdir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse(argv: Sequence[str]) -> None:
    try:
        rest = flags.FLAGS(argv)
        if _CONFIG.value is not None:
            _CONFIG.value.keys()  # a file that could not be loaded says so only when it is used
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        # config_flags raises each of these for an unknown key or a value of another type.
        lines = str(error.args[0] if error.args else error).strip().split("\n")
        reason = (lines[-1] if isinstance(error, OSError) or lines[0].endswith(":") else lines[0]).strip()
        if isinstance(error, (AttributeError, KeyError)):
            key = reason.strip("\"'")
            where = next((word.split("=")[0] for word in argv if f".{key}" in word), key)
            reason = f"the config has no key {where}; configs/base.py lists them all."
        raise UserError(f"the command line is wrong: {reason}") from error
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; options begin with --config. or --workdir.")
    if _CONFIG.value is None:
        raise UserError("--config is missing; try --config=configs/conventions.py.")


def _default_workdir(method: str) -> str:
    """The same command finds the same directory again."""
    file, _, setting = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return "/".join(["runs", "_".join(filter(None, [Path(file).stem, setting, method]))])


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv))
