"""Domains by name."""

from nca_jax.domains.base import Domain
from nca_jax.domains.conventions import Conventions
from nca_jax.errors import UserError

_DOMAINS = {"conventions": Conventions}


def make_domain(name: str, **settings) -> Domain:
    """The domain of that name; `settings` are its constructor's arguments.

    Raises:
      UserError: unknown name or setting.
    """
    if name not in _DOMAINS:
        raise UserError(f"domain.name is {name!r}; it must be one of {', '.join(_DOMAINS)}.")
    try:
        return _DOMAINS[name](**settings)
    except TypeError as error:
        raise UserError(f"domain {name!r} does not take these settings: {error}.") from error
