"""What a graft says of itself, and two pictures of one number as text."""

import logging

import pytest

from causalqwen import CausalQwenForCausalLM, NumberPrediction
from causalqwen.evaluation.quick import sketch
from causalqwen.modeling.grafting import prove
from causalqwen.numbers import ValueLaw
from conftest import graft_tiny, make_backbone


def line_of(caplog, tokenizer, **settings) -> str:
    with caplog.at_level(logging.INFO, logger="causalqwen"):
        CausalQwenForCausalLM.from_backbone(make_backbone("llama", tokenizer), tokenizer=tokenizer, **settings)
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return "\n".join(lines)


def test_a_graft_tells_what_it_added_and_what_was_found_equal(tiny_tokenizer, caplog):
    model = graft_tiny("llama", tiny_tokenizer)
    own = [p for name, p in model.named_parameters() if not name.startswith("backbone.")]
    backbone = sum(p.numel() for p in model.backbone.parameters())
    said = line_of(caplog, tiny_tokenizer)
    size = f"{sum(p.numel() for p in own):,} parameters ({sum(p.nbytes for p in own) / 1e6:.1f} MB)"
    assert said.startswith(f"{size} grafted onto the {backbone:,} of LlamaForCausalLM; of 226 tokens that were checked")
    assert said.endswith(
        " tokens that were checked, all have the backbone's logits to the last bit, and all its decision"
    )
    assert line_of(caplog, tiny_tokenizer, quiet=True) == ""


def test_a_graft_whose_logits_or_decisions_are_others_says_so(tiny_tokenizer, caplog):
    said = line_of(caplog, tiny_tokenizer, causal_size=12)
    assert "of LlamaForCausalLM; of " in said  # whatever the settings are called
    assert "checked, 0 have the backbone's logits" in said and "and all its decision" not in said
    said = line_of(caplog, tiny_tokenizer, start="documents")
    assert "all have the backbone's logits" in said and "and all its decision" not in said
    assert "all" not in str(prove(graft_tiny("llama", tiny_tokenizer, token_thresholds=1.0), ["It was late."]))


def test_the_line_goes_to_stderr_unless_the_program_logs_for_itself(capsys, monkeypatch):
    logger, root = logging.getLogger("causalqwen"), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    (handler,) = logger.handlers
    monkeypatch.setattr(handler, "stream", __import__("sys").stderr)
    logger.warning("told")
    monkeypatch.setattr(root, "handlers", [logging.NullHandler()])
    logger.warning("not told")
    assert capsys.readouterr() == ("", "told\n")


@pytest.mark.parametrize(("loc", "scale"), [(430.0, 25.0), (-2.0, 1e-3), (1e6, 1e5)])
def test_a_sketch_is_highest_at_the_mode_and_has_the_ends_of_the_interval(loc, scale):
    prediction = NumberPrediction(loc, scale, 1.0, ValueLaw())
    bars, line = sketch(prediction, 61).split("\n")
    assert len(bars) == len(line) == 61 and bars[30] == "█" and bars[0] == bars[-1] == " "
    low, median, high = (word for word in line.split() if word != "^")
    assert [float(low), float(high)] == pytest.approx(prediction.interval(0.9), rel=1e-3)
    assert float(median) == pytest.approx(loc, rel=1e-3) and abs(line.index("^") - 30) < 2
