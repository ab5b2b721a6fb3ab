"""`CausalQwenForCausalLM`: what can be asked of a grafted model."""

import os
from typing import Any

from causalqwen.files import load_tensors, save_tensors
from causalqwen.modeling import choices, grafting, individuals, prediction, survey, worlds
from causalqwen.modeling.abduction import DomainNetwork, check_domain_name, make_domain
from causalqwen.modeling.base import GraftedModel


class CausalQwenForCausalLM(GraftedModel):
    """Embedding with numbers -> backbone -> abduction -> action (theory 2.1 to 2.5).

    `backbone` is the unmodified causal language model: `model.backbone(input_ids)` is what it was before. Where a text
    holds no number, `logits` equal the backbone's to the last bit until something that text reads is trained.

    Make one with `from_backbone`, load one with `from_pretrained`. Each method stands in the module that says how its answer
    comes about.
    """

    from_backbone = classmethod(grafting.from_backbone)

    predict_number = prediction.predict_number
    predict_values = prediction.predict_values

    abduct = individuals.abduct
    abduct_population = individuals.abduct_population
    abduct_people = individuals.abduct_people
    shares = individuals.shares
    abduct_noise = individuals.abduct_noise

    predict_choice = choices.predict_choice
    survey = survey.survey

    interventional_samples = worlds.interventional_samples
    counterfactual_samples = worlds.counterfactual_samples
    value_predictions = worlds.value_predictions

    # ---- a domain of its own -------------------------------------------------------------------------------------------

    def add_domain(self, name: str, **settings: Any) -> DomainNetwork:
        """A network of a domain's own, which starts as the base's, and select it. `settings` as in `DomainNetwork`.

        Raises ValueError for a name that is taken, or no name, or settings that there are not.
        """
        check_domain_name(name)
        if name in self.config.domains:
            raise ValueError(f"a domain needs a name of its own; there is a domain {name!r}")
        network = make_domain(self.config, settings)
        self.config.domains = {**self.config.domains, name: settings}
        self.abduction.domains[name] = network.to(self.abduction.scale_net.weight.device)
        self.set_domain(name)
        return network

    def set_domain(self, name: str | None) -> None:
        """Whose abduction network is asked from now on; None for the base's. ValueError for one that is not there."""
        if name is not None and name not in self.config.domains:
            known = ", ".join(self.config.domains) or "none"
            raise ValueError(f"there is no domain {name!r}; known domains: {known}")
        self.config.domain = self.abduction.domain = name

    def save_domain(self, name: str, path: str | os.PathLike) -> None:
        """Write one domain's network alone: a safetensors file, which appears by rename."""
        if name not in self.config.domains:
            raise ValueError(f"there is no domain {name!r} to save")
        about = {"name": name, "settings": self.config.domains[name]}
        save_tensors(path, "domain", about, self.abduction.domains[name].state_dict())

    def load_domain(self, path: str | os.PathLike) -> str:
        """Add the domain that `save_domain` wrote, select it, and return its name.

        Raises ValueError for another file, a model of another size, or a name that is taken.
        """
        about, state = load_tensors(path, "domain")
        try:  # before anything of this model changes
            make_domain(self.config, about["settings"]).load_state_dict(state)
        except (RuntimeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not fit this model: {error}") from None
        self.add_domain(about["name"], **about["settings"]).load_state_dict(state)
        return about["name"]
