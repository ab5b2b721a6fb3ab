"""Rivals that are regressions on frozen features or on the characters of the text. All read the target through t."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.numbers.parts import spread_transform
from causalqwen.data.columns import TableReader
from causalqwen.evaluation.number_table import NumberTable
from causalqwen.evaluation.rivals import Forecast, Predictor, from_axis, on_axis
from causalqwen.extras import extra
from causalqwen.losses import quantile_loss
from causalqwen.numbers import CRPS_LEVELS

with extra("benchmark", "the benchmark of numbers"):
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import StandardScaler

BOOSTED_LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


def conformal_rank(count: int, level: float) -> int:
    """Place (from 0) among `count` sorted residuals of the split-conformal quantile: ceil((count + 1) level), or the last."""
    return min(math.ceil((count + 1) * level - 1e-9), count) - 1


def fit_training_quantiles(train: NumberTable, validation: NumberTable, seed: int) -> Predictor:
    """The quantiles of the training values, for everybody."""
    quantiles = np.quantile(train.values, CRPS_LEVELS.numpy())
    return lambda table: Forecast(np.broadcast_to(quantiles, (len(table), len(quantiles))))


def fit_mlp(
    train: NumberTable, validation: NumberTable, seed: int, *, epochs: int = 200, patience: int = 20
) -> Predictor:
    """A perceptron of the value branch's size on the standardized features, with the pinball loss of all 199 levels.

    It starts at the training quantiles and is stopped by the validation rows; its quantiles are sorted.
    """
    transform, generator = spread_transform(train.values), torch.Generator().manual_seed(seed)
    scaler = StandardScaler().fit(train.features)
    x, x_held = (torch.tensor(scaler.transform(part.features), dtype=torch.float32) for part in (train, validation))
    y, y_held = (torch.tensor(on_axis(transform, part.values), dtype=torch.float32) for part in (train, validation))
    levels = CRPS_LEVELS.float()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(x.shape[1], 512), nn.GELU(), nn.Dropout(0.3), nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.3),
            nn.Linear(512, len(levels)),
        )  # fmt: skip
        last: Any = net[-1]
        nn.init.zeros_(last.weight)
        last.bias.data.copy_(torch.quantile(y, levels))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        best, waited, kept = float("inf"), 0, net.state_dict()
        for _ in range(epochs):
            net.train()
            for rows in torch.randperm(len(y), generator=generator).split(64):
                optimizer.zero_grad()
                quantile_loss(y[rows, None], net(x[rows]), levels).mean().backward()
                optimizer.step()
            with torch.no_grad():
                loss = quantile_loss(y_held[:, None], net.eval()(x_held).sort(-1).values, levels).mean().item()
            waited = 0 if loss < best else waited + 1
            if not waited:
                best, kept = loss, {name: tensor.clone() for name, tensor in net.state_dict().items()}
            if waited == patience:
                break
    net.load_state_dict(kept)

    @torch.no_grad()
    def predict(table: NumberTable) -> Forecast:
        features: Tensor = torch.tensor(scaler.transform(table.features), dtype=torch.float32)
        return Forecast(from_axis(transform, net.eval()(features).sort(-1).values.double().numpy()))

    return predict


def character_grams(prompts: Sequence[str]) -> tuple[np.ndarray, Callable[[Sequence[str]], np.ndarray]]:
    """Up to 128 principal components of character 1- to 4-grams: of the training texts [n, C], and how others get theirs."""
    grams = TfidfVectorizer(analyzer="char", ngram_range=(1, 4), min_df=2, sublinear_tf=True)
    counts = grams.fit_transform(prompts)
    components = TruncatedSVD(min(128, min(counts.shape) - 1), random_state=0)
    return components.fit_transform(counts), lambda texts: components.transform(grams.transform(texts))


def fit_quantile_boosting(
    train: NumberTable, validation: NumberTable, seed: int, *, numbers: bool = False
) -> Predictor:
    """Gradient boosting on `character_grams`, one model for each of nine levels, each made conformal on the validation rows
    (moved by the split-conformal quantile of its residuals there); linear between them, and constant beyond.

    numbers: on those that stand in the texts too, read as `NumberRegressor` reads them.
    """
    transform, texts = spread_transform(train.values), [character_grams(train.prompts)]
    if numbers:
        texts.append(numbers_inside(train.prompts))

    def read(prompts: Sequence[str]) -> np.ndarray:
        return np.concatenate([new(prompts) for _, new in texts], axis=1)

    y, y_held = (on_axis(transform, part.values) for part in (train, validation))
    x, x_held = np.concatenate([known for known, _ in texts], axis=1), read(validation.prompts)
    models, shifts = [], []
    for level in BOOSTED_LEVELS:
        model = HistGradientBoostingRegressor(
            loss="quantile", quantile=level, max_iter=150, learning_rate=0.05, random_state=seed
        ).fit(x, y)
        residuals = np.sort(y_held - model.predict(x_held))
        models.append(model)
        shifts.append(residuals[conformal_rank(len(residuals), level)])

    def predict(table: NumberTable) -> Forecast:
        x_new = read(table.prompts)
        boosted = np.stack([model.predict(x_new) + shift for model, shift in zip(models, shifts, strict=True)], axis=1)
        boosted = np.sort(boosted, axis=1)
        quantiles = np.stack([np.interp(CRPS_LEVELS.numpy(), BOOSTED_LEVELS, row) for row in boosted])
        return Forecast(from_axis(transform, quantiles))

    return predict


def numbers_inside(prompts: Sequence[str]) -> tuple[np.ndarray, Callable[[Sequence[str]], np.ndarray]]:
    """Numbers that stand in texts, as columns: of the training texts [n, D], and how others get theirs."""
    reader = TableReader.fit({"text": list(prompts)}, None, ("text",))
    return reader.numbers({"text": list(prompts)}), lambda texts: reader.numbers({"text": list(texts)})
