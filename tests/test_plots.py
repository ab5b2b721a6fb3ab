"""What is drawn of predictions is what they say."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from causalqwen import NumberPrediction
from causalqwen.evaluation.plots import plot_predictions
from causalqwen.modeling.plots import plot_prediction
from causalqwen.modeling.prediction import CopiedNumberPrediction
from causalqwen.numbers import ValueLaw, ValueTransform
from causalqwen.numbers.support import Support
from causalqwen.parts.copying import CopyLaw

LEVELS = tuple(np.linspace(0, 1, 101) ** 2)
LAW = ValueLaw(ValueTransform("affine", 100.0, 5.0), "gaussian", (50.0, 150.0), LEVELS)


def test_one_prediction_is_drawn_with_density_intervals_median_and_truth():
    prediction = NumberPrediction(1.0, 0.5, 0.9, LAW)
    figure = prediction.plot(108.0, unit="K")
    (axes,) = figure.axes
    density, median, truth = axes.lines
    x, y = density.get_data()
    at = len(x) // 3
    assert np.log(y[at]) == pytest.approx(prediction.log_prob(float(x[at])))
    assert median.get_xdata()[0] == prediction.median and truth.get_xdata()[0] == 108.0
    bands = sorted((float(p.get_x()), float(p.get_x() + p.get_width())) for p in axes.patches)
    np.testing.assert_allclose(bands, [prediction.interval(level) for level in (0.9, 0.8, 0.5)])
    assert axes.get_xlabel() == "K"
    assert len(plot_prediction(prediction).axes[0].lines) == 2
    own = Figure().subplots()
    assert prediction.plot(axes=own) is own.figure and own.lines


@pytest.mark.parametrize("step", [None, 5.0])
def test_a_bound_has_a_probability_and_no_density(step):
    bounded = ValueTransform("affine", 100.0, 5.0, support=Support(95.0, 110.0, step))
    curve = NumberPrediction(0.0, 1.0, 0.9, ValueLaw(bounded, "gaussian")).curve(101, 80.0)
    assert all(density == 0 and below == (at > 100) for at, density, below in curve if not 95 <= at <= 110)
    inner = [(at, density, below) for at, density, below in curve if 95 < at < 110]
    assert all(density > 0 and below > 0.15 for _, density, below in inner)
    if step is None:  # what stands at the bounds is not in the density
        assert sum(density for _, density, _ in curve) * (curve[1][0] - curve[0][0]) == pytest.approx(0.8186, abs=0.02)


def test_numbers_of_the_context_are_bars():
    law = CopyLaw(LAW, torch.tensor([104.0, 110.0]).double(), torch.tensor([0.5, 0.3, 0.2]).double().log())
    figure = CopiedNumberPrediction(1.0, 0.5, 0.9, law).plot()
    (bars,) = figure.axes[1].collections
    assert [tuple(segment[1]) for segment in bars.get_segments()] == [
        (104.0, pytest.approx(0.3)),
        (110.0, pytest.approx(0.2)),
    ]


def test_many_predictions_beside_what_came():
    values = LAW.quantile(torch.zeros(40), torch.ones(40), (torch.arange(40.0) + 0.5).double() / 40, raw=True).tolist()
    predictions = [NumberPrediction(0.0, 1.0, 0.9, LAW)] * 40
    scatter, histogram, coverage = plot_predictions(predictions, values, "K").axes
    assert "K" in scatter.get_ylabel()
    assert {round(float(bar.get_height()), 6) for bar in histogram.patches} == {1.0}
    level, held = coverage.lines[1].get_data()
    inside = [
        np.mean([low <= value <= high for value in values]) for low, high in (predictions[0].interval(p) for p in level)
    ]
    np.testing.assert_allclose(held, inside)
    with pytest.raises(ValueError, match="expected a value for each prediction, got 1 for 40"):
        plot_predictions(predictions, [1.0])


@pytest.mark.slow
def test_a_notebook_shows_words_and_the_picture_and_keeps_its_backend():
    shown = NumberPrediction(1.0, 0.5, 0.9, LAW)._repr_html_()
    assert shown.startswith("<p>105.0 (90%: ") and "<svg" in shown and "density" in shown
    code = (
        "import matplotlib; matplotlib.use('svg'); import matplotlib.pyplot; import causalqwen.evaluation.plots; "
        "print(matplotlib.get_backend())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "svg"
