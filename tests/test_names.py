"""Every line of the names in docs/research/claims.md runs."""

import torch

import causalqwen
from causalqwen import data, losses, training
from causalqwen.data.synthetic import questions, statements
from causalqwen.distributions import get_family
from causalqwen.modeling.chain import Chain
from causalqwen.numbers import symlog
from conftest import graft_tiny
from test_docs import CLAIMS, CLAIMS_ZH, claims_section


def test_every_line_runs_in_both_languages(tiny_tokenizer, tmp_path):
    model, text = graft_tiny("qwen2", tiny_tokenizer), "It is 5 and then 12.5 of them"
    inputs = model.processor(text, return_tensors="pt")
    with torch.no_grad():
        z = model.features(**inputs).last_hidden_state
        loc_U, scale_U = model.abduction(z)
        out = model(**inputs, output_ovr=True)
    known = {name: getattr(room, name) for room in (causalqwen, data, training) for name in room.__all__}
    known |= vars(losses) | {
        "torch": torch,
        "Chain": Chain,
        "statements": statements,
        "questions": questions,
        "symlog": symlog,
        "get_family": get_family,
        "folder": tmp_path,
    }
    known |= {"model": model, "text": text, "inputs": inputs, "z": z, "loc_U": loc_U, "scale_U": scale_U, "out": out}
    known["law"] = get_family("cauchy")
    english, chinese = (claims_section(text, 3, 3) for text in (CLAIMS, CLAIMS_ZH))
    assert [row[1:] for row in english] == [row[1:] for row in chinese] and len(english) > 30
    for name, _, line in english:
        found = eval(line.strip("`"), dict(known))  # lines of our own
        assert found is not None, name
    assert torch.equal(
        eval("law.cdf(torch.tensor(0.0), torch.tensor(0.0), torch.tensor(1.0))", known), torch.tensor(0.5)
    )
