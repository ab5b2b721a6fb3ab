"""Individuals and worlds of a grafted model: abduction from what was said, intervention, prediction (theory 3.12, 3.13).

DiscoSCM's and DoWhy's words: `interventional_samples` let an individual meet fresh noise in a world that was set up;
`counterfactual_samples` ask what the individual behind an observed text would have said in another one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from causalqwen.decoding import CausalDecoding, Hindsight, Individual, Observed
from causalqwen.distributions import NOISE_STREAM, uniform_draws, upcast
from causalqwen.individuals import (
    Scorer,
    TokenEvidence,
    ValueEvidence,
    abduct_noise,
    find_posterior,
)
from causalqwen.modeling.action import ActionNetwork
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.processor import CausalQwenProcessor


@dataclass(frozen=True)
class Observation:
    """A text that somebody wrote, after a prompt that somebody else did ("" for none): only `text` speaks for them."""

    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Intervention:
    """What is set in another world.

    prompt: the text before, or a function of the observed one; None leaves it. tokens: texts forced behind so many tokens of
    the answer, `{5: " but"}`. values: numbers forced there instead of what would come, `{5: 100.0}`.
    """

    prompt: str | Callable[[str], str] | None = None
    tokens: dict[int, str] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)

    def prompt_from(self, observed: str) -> str:
        """The prompt of the world."""
        if self.prompt is None:
            return observed
        return self.prompt(observed) if callable(self.prompt) else self.prompt


@dataclass(frozen=True)
class World:
    """A text in a world: its prompt, what was said there, its tokens int64 [n], values float64 [n] (0 off `<NUM>`)."""

    prompt: str
    text: str
    tokens: Tensor
    values: Tensor


class IndividualMixin:
    """`abduct` and the worlds of a grafted model."""

    config: CausalQwenConfig
    processor: CausalQwenProcessor
    action: ActionNetwork

    @property
    def reads_numbers(self) -> bool:
        """Whether numbers in a text are `<NUM>` to this model: once its values were trained; before, they are digits."""
        return self.config.value_range is not None

    # ---- abduction ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def abduct(
        self,
        observations: str | Observation | Sequence[str | Observation],
        *,
        prior: Individual | None = None,
        spread: float | None = None,
        likelihood: str = "softmax",
        name: str = "",
        chunk: int = 512,
        evaluations: int = 3,
    ) -> Individual:
        """The individual who wrote the observed texts: the mode and width of the posterior of e1.

        With g = Phi^-1(e1): log p(g | texts) = log p(texts | g) - |g|^2 / (2 spread^2), found by Fisher scoring on features
        that are computed once (theory 3.12).

        Args:
            observations: texts, alone or behind prompts. Long ones are read `chunk` tokens at a time.
            prior: somebody known already, to be known better: evidence adds up.
            spread: the prior's standard deviation of g; None for the one under which the texts are likeliest.
            likelihood: of the tokens: "softmax" over loc_S, or "ovr", the product of one-vs-rest probabilities. Values
                count by their density under what is left to the noise.
            evaluations: of the likelihood at most, the first of them with its curvature.

        Raises:
            ValueError: nothing observed, or a prior of another model's size.
        """
        device, size = self.device, self.config.causal_size
        was_training = self.training
        self.eval()
        kept = [self._evidence(*part) for part in self._contexts(observations, chunk)]
        self.train(was_training)
        tokens, values = self._token_evidence(kept, likelihood), self._value_evidence(kept)
        evidence = [part for part in (tokens, values) if part is not None and len(part)]
        if not evidence:
            raise ValueError("the observations hold no token that something comes before: nothing can be learned")
        if prior is not None and len(prior.factor) != size:
            raise ValueError(f"{prior} does not fit a model whose causal size is {size}")
        mean = torch.zeros(size, dtype=torch.float64, device=device) if prior is None else prior.normal.to(device)
        precision: Tensor | float | None = None if spread is None else spread**-2
        if prior is not None and prior.precision is not None:
            precision = prior.precision.to(device)
        found = find_posterior(evidence, mean, precision, evaluations=evaluations)
        width = (found.precision - found.information).diagonal().mean().item() ** -0.5
        observed = Observed(
            0 if tokens is None else len(tokens),
            0 if values is None else len(values),
            found.gained,
            found.directions,
            width,
            likelihood,
        )
        before = () if prior is None else prior.evidence
        label = name or ("" if prior is None else prior.name)
        factor = torch.special.ndtr(found.mode).cpu()
        return Individual(factor, label, found.precision.cpu(), (*before, observed))

    def _contexts(self, observations: Any, chunk: int) -> list[tuple[Tensor, Tensor, int]]:
        """(ids [L], values [L], index of the first token that speaks for somebody) of everything observed."""
        given = [observations] if isinstance(observations, str | Observation) else list(observations)
        limit = getattr(self.config.text_config, "max_position_embeddings", None) or chunk
        contexts = []
        for one in given:
            observation = Observation(one) if isinstance(one, str) else one
            prompt, before = self.encode_text(observation.prompt, prompt=True)
            ids, values = self.encode_text(observation.text)
            if len(prompt) >= limit - 1:
                raise ValueError(f"the prompt has {len(prompt)} tokens, but the context of this model holds {limit}")
            room = max(min(chunk, limit) - len(prompt), 2)
            for start in range(0, len(ids), room):
                part = slice(start, start + room)
                first = max(len(prompt), 1)  # nothing predicts the first token of all
                contexts.append((torch.cat([prompt, ids[part]]), torch.cat([before, values[part]]), first))
        return [context for context in contexts if len(context[0]) > context[2]]

    def encode_text(self, text: str, *, prompt: bool = False) -> tuple[Tensor, Tensor]:
        """Ids int64 [L] and values float64 [L] of a text without special tokens; digits stay digits until values train."""
        if not text:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)
        if self.reads_numbers:
            found = self.processor(text, prompt=prompt, add_special_tokens=False)
            ids, values = found["input_ids"], found["numeric_values"]
        else:
            text = text[:-1] if prompt and text.endswith(" ") else text
            ids = self.processor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            values = [0.0] * len(ids)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float64)

    def _evidence(self, ids: Tensor, values: Tensor, first: int) -> dict[str, Tensor]:
        device = self.device
        hidden = self.features(ids[None].to(device), numeric_values=values[None].to(device)).last_hidden_state
        return {
            "features": hidden[0, first - 1 : -1],
            "targets": ids[first:].to(device),
            "values": values[first:].to(device),
        }

    def _situated(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """loc_U, scale_U [N, C] and the gain of what is drawn [N, 1]."""
        loc, scale = self.abduction(features)
        return loc, scale, self.action.draw_gain(features, loc, self.get_output_embeddings())

    def _token_evidence(self, kept: list[dict[str, Tensor]], likelihood: str) -> TokenEvidence | None:
        action, lm_head = self.action, self.get_output_embeddings()
        columns = {name: torch.cat([part[name] for part in kept]) for name in kept[0]} if kept else None
        if columns is None:
            return None
        words = columns["targets"] != self.config.num_token_id
        z, targets = columns["features"][words], columns["targets"][words]
        loc, scale, gain = self._situated(z)
        reader = self._readers(CausalDecoding())[0]
        settings: dict[str, Any] = {}
        if likelihood == "ovr":
            left = action.noise.expand_as(scale)
            if action.score_scale != "equal":
                raise ValueError("likelihood 'ovr' is there for the score scale 'equal'; use 'softmax'")
            settings = {
                "law": action.law,
                "scale": action.num_scale(left, lm_head),
                "thresholds": self.thresholds(z, loc, scale).squeeze(-1),
                "slope": action.score_slope,
            }
        return TokenEvidence(
            upcast(loc),
            upcast(scale * gain),
            targets,
            lm_head.weight,
            lm_head.bias,
            action.rest_mask,
            reader,
            likelihood,
            **settings,
        )

    def _value_evidence(self, kept: list[dict[str, Tensor]]) -> ValueEvidence | None:
        if not self.reads_numbers or not kept:
            return None
        columns = {name: torch.cat([part[name] for part in kept]) for name in kept[0]}
        numbers = columns["targets"] == self.config.num_token_id
        if not bool(numbers.any()):
            return None
        loc, scale = self.abduction(columns["features"][numbers])
        if self.value_branch is not None:
            loc, scale = self.value_branch(columns["features"][numbers], loc, scale)
        head, noise = self.action.value_head, self.action.noise
        left = self.action.value(torch.zeros_like(scale), noise.expand_as(scale))[1]
        values = self.value_transform.forward(columns["values"][numbers])
        reader = self._readers(CausalDecoding())[1]
        row, bias = head.weight[0].double(), head.bias[0].double()
        return ValueEvidence(loc, scale, values, row, bias, left, reader)

    # ---- noise -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def abduct_noise(
        self,
        observation: Observation,
        individual: Individual | None = None,
        *,
        temperature: float = 1.0,
        noise_temperature: float | None = None,
        seed: int = 0,
        steps: int = 40,
    ) -> Hindsight:
        """The noise under which `individual` (nobody in particular by default) wrote the text: a draw given what was said.

        temperature, noise_temperature: of the plan that will meet the noise again. steps: of the sampler, after a first point.
        """
        individual = individual or Individual.nobody(self.config.causal_size)
        contexts = self._contexts(observation, 2**31)
        if not contexts:
            raise ValueError("the observation holds no token that something comes before")
        ids, values, first = contexts[0]
        if not observation.prompt:
            raise ValueError("a text alone has no first token to explain: give the prompt before it")
        kept = self._evidence(ids, values, first)
        loc, scale, gain = self._situated(kept["features"])
        readers, noise = self._readers(CausalDecoding()), self.action.noise
        noise_temperature = temperature if noise_temperature is None else noise_temperature
        factor = individual.factor.to(self.device)
        held = upcast(loc) + temperature * upcast(scale * gain) * readers[0](factor).float()
        reach = noise_temperature * (upcast(noise) * gain).expand_as(held).contiguous()
        weight, bias, mask = self._score_rows()
        scorer = Scorer(held, reach, weight, bias, mask, readers[0])
        positions = torch.arange(first - 1, len(ids) - 1)
        start = uniform_draws(torch.full_like(positions, seed), NOISE_STREAM, positions, held.shape[1])
        generator = torch.Generator().manual_seed(seed)
        h, residuals = abduct_noise(
            scorer, kept["targets"], torch.special.ndtri(start), steps=steps, generator=generator
        )
        draws = torch.special.ndtr(h)
        value_residuals = torch.zeros(len(draws), dtype=torch.float64)
        numbers = (kept["targets"] == self.config.num_token_id).nonzero().squeeze(-1)
        if len(numbers):
            z = kept["features"][numbers]
            loc_V, scale_V = self.abduction(z)
            if self.value_branch is not None:
                loc_V, scale_V = self.value_branch(z, loc_V, scale_V)
            loc_V = upcast(loc_V) + temperature * scale_V * readers[1](factor).float()
            loc_V = loc_V + noise_temperature * noise * readers[1](draws[numbers]).float()
            said = self.value_transform.forward(kept["values"][numbers])
            value_residuals[numbers] = said - self.action.value(loc_V, torch.ones_like(scale_V))[0].double()
        return Hindsight(draws, kept["targets"], residuals.float(), value_residuals)

    def _score_rows(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """W [V', C], b and the rows in use, `<NUM>`'s row where it is; it takes part only once it was trained."""
        action, lm_head = self.action, self.get_output_embeddings()
        weight, bias = upcast(lm_head.weight), lm_head.bias
        row = upcast(action._num_row(lm_head))
        if action.num_appended:
            weight = torch.cat([weight, row[None]])
            bias = torch.zeros(len(weight) - 1, device=weight.device) if bias is None else upcast(bias)
            bias = torch.cat([bias, action.num_bias[None]])
        elif action.num_token_id is not None:
            weight = weight.clone()
            weight[action.num_token_id] = row
            bias = torch.zeros(len(weight), device=weight.device) if bias is None else upcast(bias).clone()
            bias[action.num_token_id] += action.num_bias
        return weight, bias, action.vocabulary_mask

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
        noise_temperature: float | None = None,
    ) -> list[list[World]]:
        """What `individual` (a new one per sample by default) writes behind each prompt, with fresh noise each time.

        Returns: `num_samples` worlds per prompt; sample j uses seed + j.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        plan = CausalDecoding(
            individual="sequence" if individual is None else individual,
            noise="token",
            temperature=temperature,
            noise_temperature=noise_temperature,
            seed=seed,
        )
        return [self._continue(prompt, plan, seed, num_samples, max_new_tokens, Intervention()) for prompt in prompts]

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
        noise_temperature: float | None = None,
        steps: int = 40,
    ) -> list[list[World]]:
        """What the individual behind an observed text would have written in other worlds.

        Args:
            interventions: the worlds; `Intervention()` is the one that was.
            noise: "redraw", the documents' reading: the same individual meets fresh noise; or "abduct": the noise that
                explains the text stays too, so that the world that was gives the observed text back, exactly.
            individual: who it was; None to abduct them from the observed text.
            num_samples: worlds per intervention; sample j draws its noise (given what was said) with seed + j.
            max_new_tokens: as many as the observed text has, by default.

        Returns: `num_samples` worlds per intervention.
        """
        if noise not in ("redraw", "abduct"):
            raise ValueError(f"unknown noise {noise!r}; use 'redraw' or 'abduct'")
        worlds = [interventions] if isinstance(interventions, Intervention) else list(interventions)
        if individual is None:
            individual = self.abduct(observed)
        length = max_new_tokens or len(self.encode_text(observed.text)[0])
        found: list[list[World]] = [[] for _ in worlds]
        for sample in range(num_samples):
            plan = CausalDecoding(
                individual=individual,
                noise="token",
                temperature=temperature,
                noise_temperature=noise_temperature,
                seed=seed + sample,
            )
            if noise == "abduct":
                kept = self.abduct_noise(
                    observed,
                    individual,
                    temperature=temperature,
                    noise_temperature=noise_temperature,
                    seed=seed + sample,
                    steps=steps,
                )
                plan = replace(plan, noise=kept)
            for place, world in enumerate(worlds):
                prompt = world.prompt_from(observed.prompt)
                found[place] += self._continue(prompt, plan, seed + sample, 1, length, world)
        return found

    def _continue(
        self, prompt: str, plan: CausalDecoding, seed: int, num_samples: int, max_new_tokens: int, world: Intervention
    ) -> list[World]:
        """Texts behind a prompt, up to each forced token, that token, and on."""
        ids, values = self.encode_text(prompt, prompt=True)
        if len(ids) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        start = len(ids)
        rows, of_rows = ids.expand(num_samples, -1), values.expand(num_samples, -1)
        forced: dict[int, tuple[Tensor, Tensor]] = {p: self.encode_text(text) for p, text in world.tokens.items()}
        for place, value in world.values.items():
            number = torch.tensor([self.config.num_token_id])
            forced[place] = (number, torch.tensor([value], dtype=torch.float64))
        stops = [*sorted(p for p in forced if p < max_new_tokens), max_new_tokens]
        for stop in stops:
            room = stop - (rows.shape[1] - start)
            if room > 0:
                here = plan
                if isinstance(plan.noise, Hindsight):
                    here = replace(here, noise=plan.noise.after(rows.shape[1] - start))
                if len(rows) > 1:  # behind a forced token every sample is a prompt of its own
                    here = replace(here, seed=[seed + row for row in range(len(rows))])
                made = self.generate(
                    rows.to(self.device),
                    numeric_values=of_rows.to(self.device),
                    attention_mask=torch.ones_like(rows).to(self.device),
                    causal_decoding=here,
                    max_new_tokens=room,
                    num_return_sequences=num_samples if rows.shape[0] == 1 and num_samples > 1 else 1,
                    pad_token_id=self.processor.tokenizer.pad_token_id or 0,
                )
                rows, of_rows = made.sequences.cpu(), made.numeric_values.cpu()
            if stop in forced and stop < max_new_tokens:
                more, of_more = forced[stop]
                rows = torch.cat([rows, more.expand(len(rows), -1)], dim=1)
                of_rows = torch.cat([of_rows, of_more.expand(len(of_rows), -1)], dim=1)
        return [self._world(prompt, row, of_row, start) for row, of_row in zip(rows, of_rows, strict=True)]

    def _world(self, prompt: str, ids: Tensor, values: Tensor, start: int) -> World:
        """The world of a sequence whose first `start` tokens are the prompt; it ends before an end of text."""
        end = self.generation_config.eos_token_id
        ends = torch.tensor([end] if isinstance(end, int) else (end or []))
        last = torch.isin(ids[start:], ends).nonzero()
        if len(last):
            ids, values = ids[: start + int(last[0])], values[: start + int(last[0])]
        said = self.processor.decode(ids, numeric_values=values)
        before = self.processor.decode(ids[:start], numeric_values=values[:start])
        return World(prompt, said[len(before) :], ids[start:], values[start:])
