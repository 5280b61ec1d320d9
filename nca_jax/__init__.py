"""Robust on-policy context distillation in JAX."""

__version__ = "0.1.0"
