"""Domains by name."""

from ml_collections import ConfigDict

from nca_jax.domains.base import Domain, find_context, system_context
from nca_jax.domains.conventions import Conventions
from nca_jax.domains.games import Frozenlake, Sokoban
from nca_jax.domains.medmcqa import Medmcqa
from nca_jax.domains.safety import Safety
from nca_jax.errors import UserError

_DOMAINS = {
    "conventions": Conventions,
    "frozenlake": Frozenlake,
    "medmcqa": Medmcqa,
    "safety": Safety,
    "sokoban": Sokoban,
}


def make_domain(name: str, **settings) -> Domain:
    """The domain of that name; `settings` are its constructor's arguments.

    Raises:
      UserError: unknown name or setting.
    """
    if name not in _DOMAINS:
        raise UserError(f"domain.name is {name!r}; it must be one of {', '.join(_DOMAINS)}.")
    try:
        return _DOMAINS[name](**settings)
    except (TypeError, ValueError) as error:  # an unknown argument; a value that a library refuses
        raise UserError(f"domain {name!r} does not take these settings: {error}.") from error


def domain_of(config: ConfigDict) -> Domain:
    """The domain a config names, with the context it names.

    Raises:
      UserError: as `make_domain` and `base.find_context`; or two contexts.
    """
    domain = make_domain(config.domain.name, **config.domain.settings)
    if config.context.file and config.context.text:
        raise UserError("config.context.file and config.context.text are both set; give one of them.")
    if config.context.file:
        domain.context = find_context(domain, config.context.file)
    elif config.context.text:
        domain.context = system_context(config.context.text)
    return domain
