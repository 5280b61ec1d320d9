"""The inside of a model before and after training; `python -m nca_jax.analysis` is the command."""
