"""An abduction network of a domain's own, held close to the base's (overview 2.3; theory 3.10).

    loc_D = loc_U + scale_U t a(z),   scale_D = scale_U exp(t d(z))      a, d: the domain's network, 0 at the start

D(U_D, U), the mean over coordinates of KL(law_D || law_U), depends on a, d and t alone. With a limit, t is the largest number
up to 1 at which D <= limit, found at every position anew: the limit holds wherever the model is asked, not only on average.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from causalqwen.checking import nearest
from causalqwen.distributions import StableFamily, get_family, upcast
from causalqwen.files import load_tensors, save_tensors
from causalqwen.parts.perceptron import ResidualPerceptron

if TYPE_CHECKING:
    from causalqwen.modeling.abduction import AbductionNetwork, LawOfU
    from causalqwen.modeling.configuration import CausalQwenConfig
    from causalqwen.modeling.model import CausalQwenForCausalLM

_HALVINGS = 24


class DomainNetwork(nn.Module):
    """What a domain changes about who is speaking.

    Args:
        hidden_size: H of the features; causal_size: C.
        layers: hidden layers of `width`, with GELU; 0 for a linear map.
        limit: upper limit of D at every position, in nats per coordinate; None for none.
        family: the law of U, for the divergence.
    """

    def __init__(
        self,
        hidden_size: int,
        causal_size: int,
        *,
        layers: int = 0,
        width: int = 256,
        limit: float | None = None,
        family: str = "cauchy",
    ) -> None:
        super().__init__()
        for name, value in (("layers", layers), ("width", width)):
            if not isinstance(value, int) or isinstance(value, bool) or value < (name == "width"):
                raise ValueError(f"a domain's {name} is a whole number, got {value!r}")
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ValueError(f"a domain's limit must be positive, got {limit!r}")
        self.limit, self.law = limit, get_family(family)
        self.residual = ResidualPerceptron(hidden_size, width, 2 * causal_size, layers=layers)

    def moves(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """a and d [..., C] from features z [..., H], before any limit; d within +-20."""
        a, d = upcast(self.residual(features)).chunk(2, dim=-1)
        return a, d.clamp(-20.0, 20.0)

    def moved(self, base: "LawOfU") -> "LawOfU":
        """The domain's law [..., C] of who speaks, loc in the dtype of the base's."""
        loc, scale = base.loc, base.scale
        a, d = self._held(*self.moves(base.features))
        law = type(base)(base.network, base.features)
        law.loc, law.scale = (upcast(loc) + scale * a).to(loc.dtype), scale * d.exp()
        return law

    def distance(self, features: Tensor) -> Tensor:
        """D(U_D, U) [...] at features z [..., H], as the limit leaves it."""
        return divergence(self.law, *self._held(*self.moves(features)))

    def _held(self, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        if self.limit is None:
            return a, d
        t = held(self.law, a.detach(), d.detach(), self.limit)
        return t * a, t * d


def divergence(law: StableFamily, a: Tensor, d: Tensor) -> Tensor:
    """D [...] of moves a, d [..., C]: the mean over coordinates of KL(S(a, e^d) || S(0, 1))."""
    return law.kl(a, d.exp(), torch.zeros_like(a), torch.ones_like(d)).mean(-1)


@torch.no_grad()
def held(law: StableFamily, a: Tensor, d: Tensor, limit: float) -> Tensor:
    """t [..., 1] in [0, 1] with D(t a, t d) <= limit, as large as halving finds it; 1 wherever that is close enough."""
    low = torch.zeros_like(a[..., :1])
    high = torch.ones_like(low)
    free = divergence(law, a, d).unsqueeze(-1) <= limit
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        within = divergence(law, middle * a, middle * d).unsqueeze(-1) <= limit
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    return torch.where(free, torch.ones_like(low), low)


def add_domain(model: "CausalQwenForCausalLM", name: str, **settings: Any) -> DomainNetwork:
    """A network of a domain's own, which starts as the base's, and select it. `settings` as in `DomainNetwork`.

    Raises ValueError for a name that is taken, or no name, or settings that there are not.
    """
    _check_name(name)
    if name in model.config.domains:
        raise ValueError(f"a domain needs a name of its own; there is a domain {name!r}")
    network = make_domain(model.config, settings)
    model.config.domains = {**model.config.domains, name: settings}
    model.abduction.domains[name] = network.to(model.abduction.scale_net.weight.device)
    set_domain(model, name)
    return network


def check_asked(model: "CausalQwenForCausalLM", name: str, settings: dict[str, Any]) -> None:
    """ValueError for a name that `add_domain` would not take, or settings that the domain of this name does not have."""
    own = model.config.domains.get(name)
    if own is None:
        _check_name(name)
    else:
        for key, value in settings.items():
            if value != own.get(key):
                raise ValueError(
                    f"domain {name!r} is there already, its {key} {own.get(key)!r}: leave domain_{key} out"
                )


def _check_name(name: str) -> None:
    if not name.isidentifier() or hasattr(nn.ModuleDict, name):
        raise ValueError(
            f"a domain needs a name of its own, of letters, digits and _, and none of torch's own; got {name!r}"
        )


def ask(model: "CausalQwenForCausalLM", name: str, **settings: Any) -> DomainNetwork:
    """Select a domain's network, made with these settings where there is none of that name yet."""
    if name not in model.config.domains:
        return add_domain(model, name, **settings)
    set_domain(model, name)
    network: Any = model.abduction.domains[name]
    return network


def set_domain(model: "CausalQwenForCausalLM", name: str | None) -> None:
    """Whose abduction network is asked from now on; None for the base's. ValueError for one that is not there."""
    if name is not None and name not in model.config.domains:
        known = ", ".join(model.config.domains) or "none"
        raise ValueError(f"there is no domain {name!r}; known domains: {known}")
    model.config.domain = model.abduction.domain = name


def save_domain(model: "CausalQwenForCausalLM", name: str, path: str | os.PathLike) -> None:
    """Write one domain's network alone: a safetensors file, which appears by rename."""
    if name not in model.config.domains:
        raise ValueError(f"there is no domain {name!r} to save")
    about = {"name": name, "settings": model.config.domains[name]}
    save_tensors(path, "domain", about, model.abduction.domains[name].state_dict())


def load_domain(model: "CausalQwenForCausalLM", path: str | os.PathLike) -> str:
    """Add the domain that `save_domain` wrote, select it, and return its name.

    Raises ValueError for another file, a model of another size, or a name that is taken.
    """
    about, state = load_tensors(path, "domain")
    try:  # before anything of this model changes
        make_domain(model.config, about["settings"]).load_state_dict(state)
    except (RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not fit this model: {error}") from None
    add_domain(model, about["name"], **about["settings"]).load_state_dict(state)
    return about["name"]


def make_domain(config: "CausalQwenConfig", settings: dict[str, Any]) -> DomainNetwork:
    """The network of these settings for a model of this configuration. ValueError for a setting that there is not."""
    known = ("layers", "width", "limit")
    if unknown := [name for name in settings if name not in known]:
        raise ValueError(f"unknown setting {unknown[0]} of a domain; {nearest(unknown[0], known)}")
    return DomainNetwork(config.hidden_size, config.causal_size, family=config.vocabulary_family, **settings)


def equip(abduction: "AbductionNetwork", config: "CausalQwenConfig") -> None:
    """Give a model of this configuration its domains."""
    for name, settings in config.domains.items():
        abduction.domains[name] = make_domain(config, settings)
    abduction.domain = config.domain
