"""Individuals of a grafted model: who wrote what was observed, and under which noise (theory 3.12, 3.13)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from causalqwen.decoding import CausalDecoding, Hindsight, Individual, Observed
from causalqwen.distributions import NOISE_STREAM, uniform_draws, upcast
from causalqwen.individuals import (
    LIKELIHOODS,
    Scorer,
    TokenEvidence,
    ValueEvidence,
    abduct_noise,
    find_posterior,
    line_posterior,
    loading_sizes,
    sample_posterior,
)
from causalqwen.modeling.action import ActionNetwork
from causalqwen.modeling.configuration import CausalQwenConfig
from causalqwen.modeling.processor import CausalQwenProcessor


@dataclass(frozen=True)
class Observation:
    """A text that somebody wrote, after a prompt that somebody else did ("" for none): only `text` speaks for them."""

    text: str
    prompt: str = ""


@dataclass
class Reading:
    """Observed tokens: features [N, H] of what comes before each, the tokens themselves int64 [N], values float64 [N]."""

    features: Tensor
    targets: Tensor
    values: Tensor

    def __getitem__(self, places: slice) -> "Reading":
        return Reading(self.features[places], self.targets[places], self.values[places])


@dataclass(frozen=True)
class Share:
    """A token of a text, and how much of what varies there is who speaks: in [0, 1], the rest is noise (theory 3.14)."""

    text: str
    who: float


class IndividualMixin:
    """`abduct` and `abduct_noise` of a grafted model."""

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
        method: str = "auto",
        name: str = "",
        chunk: int = 512,
        evaluations: int = 3,
        draws: int = 200,
        seed: int = 0,
    ) -> Individual:
        """The individual who wrote the observed texts: the posterior of e1.

        With g = Phi^-1(e1): log p(g | texts) = log p(texts | g) - |g|^2 / (2 spread^2), found by Fisher scoring on features
        that are computed once (theory 3.12).

        Args:
            observations: texts, alone or behind prompts. Long ones are read `chunk` tokens at a time.
            prior: somebody known already, to be known better: evidence adds up.
            spread: the prior's standard deviation of g; None for the one under which the texts are likeliest.
            likelihood: of the tokens: "softmax" over loc_S, or "ovr", the product of one-vs-rest probabilities. Values
                count by their density under what is left to the noise. "values": the numbers alone, as rows of one
                individual do in training; e1 is uniform then unless a spread is given.
            method: "mode", the mode and width of the posterior; "sample", `draws` draws of it from each of two chains, with
                their diagnostics (hundreds of evaluations of the likelihood); "quadrature", the exact posterior of
                values on a line (theory 3.14), for "values" alone; "auto", the mode, or the quadrature where values alone
                speak and their law is not Gaussian.
            evaluations: of the likelihood at most, the first of them with its curvature.

        Raises:
            ValueError: nothing observed; a prior of another model's size; a spread beside a prior that has a width; a
                method that is unknown, or does not fit.
        """
        device, size = self.device, self.config.causal_size
        if likelihood not in LIKELIHOODS:
            raise ValueError(f"unknown likelihood {likelihood!r}; use one of {', '.join(LIKELIHOODS)}")
        of_values = likelihood == "values"
        if method == "auto":
            method = "quadrature" if of_values and self.action.value_law.alpha != 2 and prior is None else "mode"
        if method not in ("mode", "sample", "quadrature"):
            raise ValueError(f"unknown method {method!r}; use 'auto', 'mode', 'sample' or 'quadrature'")
        was_training = self.training
        self.eval()
        read = self.read(self._contexts(observations, chunk))
        self.train(was_training)
        values = self.value_evidence(read)
        if of_values and not len(values):
            raise ValueError("the observations hold no number, and likelihood 'values' hears nothing else")
        if method == "quadrature":
            if not of_values or prior is not None or spread is not None:
                raise ValueError("method 'quadrature' is for likelihood 'values' without a prior or a spread")
            return self._on_line(values, draws, name)
        tokens = self.token_evidence(read[:0] if of_values else read, "softmax" if of_values else likelihood)
        if of_values and spread is None and (prior is None or prior.precision is None):
            spread = 1.0
        if prior is not None and len(prior.factor) != size:
            raise ValueError(f"{prior} does not fit a model whose causal size is {size}")
        mean = torch.zeros(size, dtype=torch.float64, device=device) if prior is None else prior.normal.to(device)
        if spread is not None and prior is not None and prior.precision is not None:
            raise ValueError("a prior that was inferred brings its own width: leave spread out")
        precision: Tensor | float | None = None if spread is None else spread**-2
        if prior is not None and prior.precision is not None:
            precision = prior.precision.to(device)
        found = find_posterior([tokens, values], mean, precision, evaluations=evaluations)
        width = (found.precision - found.information).diagonal().mean().item() ** -0.5
        observed = Observed(len(tokens), len(values), found.gained, found.directions, width, likelihood, method)
        made = None
        if method == "sample":
            made, trust = sample_posterior([tokens, values], found, draws=draws, seed=seed)
            observed = replace(observed, rhat=trust.rhat, effective=trust.effective)
        before = () if prior is None else prior.evidence
        label = name or ("" if prior is None else prior.name)
        factor = torch.special.ndtr(found.mode).clamp(1e-15, 1 - 1e-15).cpu()  # inside (0, 1) in float64 too
        return Individual(factor, label, found.precision.cpu(), (*before, observed), made)

    def _on_line(self, values: ValueEvidence, draws: int, name: str) -> Individual:
        """The posterior of values alone under a law that is not Gaussian: draws along the line, the median its factor."""
        row, law = values.row.double(), values.reader.law
        residuals = values.values.double() - values.loc.double() @ row - values.bias
        loadings = values.reach.double() * row
        count = draws + 1 - draws % 2  # odd: the median is one of them
        places, gained = line_posterior(law, residuals, loadings, values.scale.double(), count)
        one = torch.ones((), dtype=torch.float64)
        # Q(e1_c) = sign(W_c) t: one side of it is exact, the other follows by symmetry
        along = torch.special.ndtri(law.cdf(-places.abs(), 0 * one, one)) * -places.sign()
        g = row.sign() * along.unsqueeze(-1)
        observed = Observed(0, len(values), gained, 1.0, 1.0, "values", "quadrature")
        return Individual(torch.special.ndtr(g[count // 2]).clamp(1e-15, 1 - 1e-15), name, None, (observed,), g)

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

    def read(self, contexts: list[tuple[Tensor, Tensor, int]]) -> Reading:
        """Everything observed as the backbone reads it, a context at a time.

        Raises ValueError where nothing comes before any token.
        """
        if not contexts:
            raise ValueError("the observations hold no token that something comes before: nothing can be learned")
        columns: list[tuple[Tensor, ...]] = []
        known: dict[tuple, Tensor] = {}  # the last token is never read: repeated measures share all before it
        for ids, values, first in contexts:
            before = (first, *ids[:-1].tolist(), *values[:-1].tolist())
            ids, values = ids.to(self.device), values.to(self.device)
            if before not in known:
                hidden = self.features(ids[None, :-1], numeric_values=values[None, :-1]).last_hidden_state[0]
                known[before] = hidden[first - 1 :]
            columns.append((known[before], ids[first:], values[first:]))
        return Reading(*(torch.cat(column) for column in zip(*columns, strict=True)))

    def _situated(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """loc_U, scale_U [N, C] and the gain of what is drawn [N, 1]."""
        loc, scale = self.abduction(features)
        return loc, scale, self.action.draw_gain(features, loc, self.get_output_embeddings())

    def token_evidence(self, read: Reading, likelihood: str = "softmax") -> TokenEvidence:
        """The words among what was read."""
        action, lm_head = self.action, self.get_output_embeddings()
        words = read.targets != self.config.num_token_id
        z, targets = read.features[words], read.targets[words]
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

    def value_evidence(self, read: Reading) -> ValueEvidence:
        """The numbers among what was read; none before values are trained."""
        numbers = (read.targets == self.config.num_token_id) & self.reads_numbers
        z = read.features[numbers]
        loc, scale = self.as_values_read(z, *self.abduction(z))
        head = self.action.value_head
        left = self.value_loadings(loc, scale)[1]
        values = self.value_transform.forward(read.values[numbers])
        reader = self._readers(CausalDecoding())[1]
        return ValueEvidence(loc, scale, values, head.weight[0].double(), head.bias[0].double(), left, reader)

    @torch.no_grad()
    def shares(self, observation: str | Observation, chunk: int = 512) -> list[Share]:
        """How much of the variation of each token's score, or value, is who speaks, and how much is noise.

        At a token y: sum_c |W_yc scale_U,c|^a over that and sum_c |W_yc b_noise,c|^a, a the law's index; at a number the same
        with W_reg and the scales that the value head reads.
        """
        observation = Observation(observation) if isinstance(observation, str) else observation
        read = self.read(self._contexts(observation, chunk))
        action, num_id = self.action, self.config.num_token_id
        loc, scale = self.abduction(read.features)
        rows = upcast(self._score_rows()[0][read.targets]).abs() ** action.law.alpha
        who = (rows * upcast(scale) ** action.law.alpha).sum(-1)
        noise = (rows * action.noise**action.law.alpha).sum(-1)
        numbers = (read.targets == num_id) & self.reads_numbers
        if bool(numbers.any()):
            law = action.value_law
            loadings, left = self.value_loadings(*self.as_values_read(read.features, loc, scale))
            who = torch.where(numbers, loading_sizes(law, loadings) ** law.alpha, who)
            noise = torch.where(numbers, left**law.alpha, noise)
        texts = [
            self.processor.decode([token], numeric_values=[value])
            for token, value in zip(read.targets.tolist(), read.values.tolist(), strict=True)
        ]
        return [Share(text, share) for text, share in zip(texts, (who / (who + noise)).tolist(), strict=True)]

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
        steps: int = 20,
    ) -> Hindsight:
        """The noise under which `individual` (nobody in particular by default) wrote the text: a draw given what was said.

        temperature, noise_temperature: of the plan that will meet the noise again. steps: of the sampler, after a first point.
        """
        individual = individual or Individual.nobody(self.config.causal_size)
        if not observation.prompt:
            raise ValueError("a text alone has no first token to explain: give the prompt before it")
        contexts = self._contexts(observation, 2**31)
        if len(contexts) > 1:
            raise ValueError(
                "the text is longer than the context of this model: its noise cannot be found in one piece"
            )
        read = self.read(contexts)
        first = contexts[0][2]
        loc, scale, gain = self._situated(read.features)
        readers, noise = self._readers(CausalDecoding()), self.action.noise
        noise_temperature = temperature if noise_temperature is None else noise_temperature
        factor = individual.factor.to(self.device)
        held = upcast(loc) + temperature * upcast(scale * gain) * readers[0](factor).float()
        reach = noise_temperature * (upcast(noise) * gain).expand_as(held).contiguous()
        weight, bias, mask = self._score_rows()
        scorer = Scorer(held, reach, weight, bias, mask, readers[0])
        positions = torch.arange(first - 1, first - 1 + len(read.targets))
        start = uniform_draws(torch.full_like(positions, seed), NOISE_STREAM, positions, held.shape[1])
        generator = torch.Generator().manual_seed(seed)
        h, residuals = abduct_noise(scorer, read.targets, torch.special.ndtri(start), steps=steps, generator=generator)
        draws = torch.special.ndtr(h)
        said, value_residuals = torch.zeros(2, len(draws), dtype=torch.float64)
        numbers = (read.targets == self.config.num_token_id).nonzero().squeeze(-1)
        if len(numbers):
            z = read.features[numbers]
            loc_V, scale_V = self.as_values_read(z, *self.abduction(z))
            loc_V = upcast(loc_V) + temperature * scale_V * readers[1](factor).float()
            loc_V = loc_V + noise_temperature * self.value_noise * readers[1](draws[numbers]).float()
            said[numbers] = self.value_transform.forward(read.values[numbers])
            value_residuals[numbers] = said[numbers] - self.action.value(loc_V, torch.ones_like(scale_V))[0].double()
        return Hindsight(draws, read.targets, residuals.float(), said, value_residuals)

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
