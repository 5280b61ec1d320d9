"""The page of `python -m nca_jax.report`: what it reads, what it says, and how it looks."""
