"""What all commands have in common: which messages are shown."""

import logging
import os

from absl import logging as absl_logging


def set_up_logging() -> None:
    """Our own messages and everyone's warnings; the libraries' progress reports stay silent."""
    # transformers would say that it found no PyTorch, which is as it should be.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", force=True)
    absl_logging.set_verbosity(absl_logging.WARNING)
    logging.getLogger("nca_jax").setLevel(logging.INFO)
