"""`CausalQwenForCausalLM`: what can be asked of a grafted model."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from causalqwen.decoding import CausalDecoding, Individual, ObservedNoise, Population, Voices
from causalqwen.extras import extra
from causalqwen.files import load_tensors, save_tensors
from causalqwen.modeling import choices, grafting, individuals, prediction, worlds
from causalqwen.modeling.abduction import DomainNetwork, check_domain_name, make_domain
from causalqwen.modeling.base import GraftedModel
from causalqwen.modeling.choices import ChoicePrediction
from causalqwen.modeling.individuals import Observations, Share
from causalqwen.modeling.prediction import NumberPrediction
from causalqwen.modeling.reading import Observation
from causalqwen.modeling.survey import Question, survey_rows
from causalqwen.modeling.worlds import Intervention, World
from causalqwen.parts.copying import Candidates


class CausalQwenForCausalLM(GraftedModel):
    """Embedding with numbers -> backbone -> abduction -> action (theory 2.1 to 2.5).

    `backbone` is the unmodified causal language model: `model.backbone(input_ids)` is what it was before. Where a text
    holds no number, `logits` equal the backbone's to the last bit until something that text reads is trained.

    Make one with `from_backbone`, load one with `from_pretrained`. How an answer comes about stands
    in the module that each is asked of.
    """

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str | PreTrainedModel,
        dtype: torch.dtype | str | None = None,
        start: str = "faithful",
        tokenizer: PreTrainedTokenizerBase | None = None,
        text: str | None = None,
        quiet: bool = False,
        **config: Any,
    ) -> Any:
        """Graft a number channel and an individual onto a pretrained decoder, which itself stays as it is.

        One line tells what was added, and on how many tokens of a few lines the logits were found to be the backbone's: at
        level INFO of the logger `causalqwen`, which writes to stderr where the program has set up no logging of its own
        (`logging.getLogger("causalqwen").setLevel("WARNING")` for silence).

        Args:
            name_or_path: a folder, a hub name, `smollm2-135m` (the default backbone), or a loaded model (with its
                `tokenizer`).
            dtype: of the backbone; transformers' own choice by default. The heads stay in float32.
            start: the start values, one of `STARTS`. "faithful": every decision is the backbone's.
            text: what a causal size below H is fitted to, some thousand tokens (`narrow_head`); a few lines by default.
            quiet: neither compare nor tell.
            config: any field of `CausalQwenConfig`, over those of the start.

        Raises:
            ValueError: an unknown start or field; a setting that does nothing beside the others (`parts.compatibility`); a
                model that is no decoder (encoder-only, encoder-decoder), or whose logits are no linear map of its features.
        """
        return grafting.from_backbone(cls, name_or_path, dtype, start, tokenizer, text, quiet, **config)

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def predict_number(
        self,
        prompts: str | Sequence[str],
        batch_size: int = 32,
        *,
        individual: Individual | None = None,
        classes: str | Sequence[str | None] | None = None,
    ) -> list[NumberPrediction]:
        """What number follows each prompt, as a distribution.

        Args:
            prompts: texts that end where the number would start ("The boiling point of water is"); a trailing space is
                dropped, because `<NUM>` brings its own.
            batch_size: prompts per forward pass.
            individual: whom the number is about; nobody in particular by default. Whatever is not known about somebody who was
                inferred is integrated out. Somebody who was inferred from words counts as nobody in particular, because
                training never learned how numbers follow from words; `abduct(likelihood="values")` infers people from numbers.
            classes: the class of each number, or one for all. Intervals are then recalibrated for that class and, where classes
                have axes of their own, the number is read on that class's axis. None for `number_class`, and where that is None
                too, for the model's own recalibration. Numbers about an individual are never recalibrated, and are of
                `number_class`.

        Returns:
            one `NumberPrediction` per prompt, in their order; a `CopiedNumberPrediction` where the model copies and the prompt
            holds numbers. A graft that has learned no numbers warns, once.

        Raises:
            ValueError: an empty prompt, or one longer than the context, by its index; an individual whose numbers are a
                mixture, asked of a model that copies; a class that the model does not know, or not as many classes as prompts.
        """
        return prediction.predict_number(self, prompts, batch_size, individual, classes)

    def predict_values(
        self,
        features: Tensor,
        individual: Individual | None = None,
        candidates: Candidates | None = None,
        classes: Sequence[str | None] | None = None,
    ) -> list[NumberPrediction]:
        """The number that `individual` says after each of the features [n, H], as `predict_number` does after prompts.

        candidates: the numbers that each may be a copy of; None for none. classes: one per row; None for none.
        """
        return prediction.predict_values(self, features, individual, candidates, classes)

    # ---- individuals -------------------------------------------------------------------------------------------------

    def abduct(
        self,
        observations: Observations,
        *,
        prior: Individual | Voices | None = None,
        spread: float | None = None,
        likelihood: str = "softmax",
        method: str = "auto",
        name: str = "",
        evaluations: int = 3,
        draws: int = 200,
        seed: int = 0,
    ) -> Individual:
        """The individual who wrote the observed texts: the posterior of e1.

        With g = Phi^-1(e1): log p(g | texts) = log p(texts | g) - |g|^2 / (2 spread^2), found by Fisher scoring on features
        that are computed once (theory 3.12).

        Args:
            observations: texts, alone or behind prompts, and choices. Long texts are read `reading.CHUNK` tokens at a time.
            prior: somebody known already, to be known better: evidence adds up. Or `Voices` that were learned from many people
                (`training.learn_voices`): the individual is then heard in words at every depth of the backbone (theory 3.17),
                e1 is inferred given that; spread, likelihood and method are refused.
            spread: the prior's standard deviation of g; None for the one under which the texts are likeliest, at most that of
                score scale.
            likelihood: of the tokens: "softmax" over loc_S, or "ovr", the product of one-vs-rest probabilities. Values
                count by their density under what is left to the noise. "values": the numbers alone, as rows of one
                individual do in training; e1 is uniform then unless a spread is given. Choices are words: they are heard by the
                softmax of their options, and not at all by "values".
            method: "mode", the mode and width of the posterior; "sample", `draws` draws of it from each of two chains, with
                their diagnostics (hundreds of evaluations of the likelihood); "quadrature", the exact posterior of
                values on a line (theory 3.14), for "values" alone; "auto", the mode, or the quadrature where values alone
                speak and their law is not Gaussian.
            evaluations: of the likelihood at most, the first of them with its curvature.

        Raises:
            ValueError: nothing observed; a prior of another model's size, or from words where values alone count; a spread
                beside a prior that has a width; a method that is unknown, or does not fit.
        """
        way = individuals.Abduction(prior, spread, likelihood, method, evaluations, draws, seed)
        return individuals.abduct(self, observations, way, name)

    def abduct_population(
        self,
        observations: Mapping[str, str | Observation | Sequence[str | Observation]],
        *,
        likelihood: str = "softmax",
        name: str = "",
    ) -> Individual:
        """What a person is like before they say anything: the law of e1, learned from the words of several people by their
        names.

        Its mean is what these people share, and its width is how much they differ (`likeliest_population`). As a prior of
        `abduct` it stands for a new person of their kind; `draw(seed)` makes such a person up.

        Raises ValueError for fewer than two people, or one who said no words.
        """
        return individuals.abduct_population(self, observations, likelihood, name)

    def abduct_people(
        self,
        observations: Mapping[str, Observations],
        *,
        facts: Mapping[str, Mapping[str, Any]] | None = None,
        prior: Individual | None = None,
        likelihood: str = "softmax",
    ) -> Population:
        """Infer several people by their names, each as `abduct` does, as a population that can be asked (`survey`).

        facts: what else is known of each person. A prompt that several people were asked is read once. Where somebody's words
        are heard and numbers too, the numbers also tell by themselves (`Population.numbers`).
        """
        return individuals.abduct_people(self, observations, facts, prior, likelihood)

    def shares(self, observation: str | Observation) -> list[Share]:
        """How much of the variation of each token's score, or value, is who speaks, and how much is noise.

        At a token y: sum_c |W_yc scale_U,c|^a over scale_S,y^a, a the law's index, what the token's own noise adds included; at
        a number sum_c |W_reg,c scale_c|^a over that of U', as the value head reads them.
        """
        return individuals.shares(self, observation)

    def abduct_noise(
        self, observation: Observation, individual: Individual | None = None, *, temperature: float = 1.0, seed: int = 0
    ) -> ObservedNoise:
        """Draw the own noise under which `individual` (the population average by default) wrote the text, given the text.

        The noise that all tokens share stays integrated out: it is part of each token's own. temperature: of the plan that the
        noise will be given to. See `individuals.observed_noise`.

        Raises:
            ValueError: no prompt; temperature 0; a text beyond the context; a vocabulary whose scores have no own noise, or are
                not Gaussian.
        """
        return individuals.abduct_noise(self, observation, individual, temperature, seed)

    # ---- questions ---------------------------------------------------------------------------------------------------

    def predict_choice(
        self, prompts: str | Sequence[str], options: Sequence[str], *, individual: Individual | None = None
    ) -> list[ChoicePrediction]:
        """Which of the options follows each prompt, as `individual` would say it; nobody in particular by default.

        Options are what may be written behind the prompt, each to the end of its line. At every token where they part, a
        softmax over loc_S of the tokens that they go on with says how likely each branch is (a decoder that may write nothing
        but options). What is not known about somebody who was inferred is integrated out, over the draws of their posterior.

        Raises ValueError for an empty prompt, fewer than two options or two that are alike.
        """
        return choices.predict_choice(self, prompts, options, individual)

    def survey(
        self, population: Population, questions: Sequence[Question] | Question, *, draws: int = 1, seed: int = 0
    ) -> Any:
        """Ask everybody every question: a pandas.DataFrame of people x questions, with an index of person (and draw).

        An answer is a number, an option or a text. With `draws` 0 nothing is drawn: who somebody is and the noise are
        integrated out, so that a number is its median, and options are a dictionary of their probabilities. A prompt is read
        once for all people. Answers depend neither on the order of people and questions, nor on who else is asked what. See
        `Survey`.

        Raises:
            ImportError: pandas is not installed. ValueError: see `Survey`; a number is asked of a model that copies, or that
                has not learned values.
        """
        with extra("tables", "a survey's table"):
            import pandas
        rows = list(survey_rows(self, population, questions, draws=draws, seed=seed))
        return pandas.DataFrame(rows).set_index(["person", "draw"] if draws > 1 else "person")

    # ---- worlds ------------------------------------------------------------------------------------------------------

    def interventional_samples(
        self,
        prompts: str | Sequence[str],
        individual: Individual | None = None,
        *,
        num_samples: int = 1,
        max_new_tokens: int = 64,
        seed: int = 0,
        temperature: float = 1.0,
        streamer: Any = None,
    ) -> list[list[World]]:
        """What `individual` (a new one per sample by default) writes behind each prompt, with fresh noise each time.

        temperature: of the plan (`CausalDecoding`).
        streamer: of transformers; it sees each token of each text as it comes.

        Returns: `num_samples` worlds per prompt; sample j uses seed + j.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        who = "sequence" if individual is None else individual
        plan = CausalDecoding.preset("persona", individual=who, seed=seed, temperature=temperature)
        world, told = Intervention(), streamer
        return [worlds.continue_prompt(self, one, plan, num_samples, max_new_tokens, world, told) for one in prompts]

    def counterfactual_samples(
        self,
        observed: Observation,
        interventions: Intervention | Sequence[Intervention],
        *,
        noise: str = "abduct",
        individual: Individual | None = None,
        num_samples: int = 1,
        max_new_tokens: int | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        streamer: Any = None,
    ) -> list[list[World]]:
        """What the individual behind an observed text would have written in other worlds.

        Args:
            interventions: the worlds; `Intervention()` is the one that was.
            noise: "redraw", the documents' reading: the same individual meets fresh noise; or "abduct": the noise that
                explains the text stays too, so that the world that was gives the observed text back, exactly
                in float32.
            individual: who wrote the text; None to infer them from it.
            num_samples: worlds per intervention; sample j draws its noise (given what was said) with seed + j.
            max_new_tokens: as many as the observed text has, by default.
            temperature: of the plan (`CausalDecoding`).
            streamer: as of `interventional_samples`.

        Returns: `num_samples` worlds per intervention.

        Raises:
            ValueError: an unknown noise; a speaker or an individual that does not fit; a place of an intervention that lies
                after the last token.
        """
        how = noise, individual, num_samples, max_new_tokens, seed, temperature, streamer
        return worlds.counterfactual_samples(self, observed, interventions, *how)

    def value_predictions(self, world: World, individual: Individual) -> dict[int, NumberPrediction]:
        """The law of each value of a world, but of those that were forced, by the index of its token.

        It is the law of what `individual` says at that place under fresh noise, with everything that is not known about them
        integrated out: `predict_number(..., individual=)` behind the world's prompt and the text before the value. Of somebody
        with a voice it is read under the voice, as the text was.
        """
        return worlds.value_predictions(self, world, individual)

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
