"""Are the decisions of `generate` those of the reference, step by step? (about ten minutes on two cores)

Positions of real text, one at a time per row, as in a decoding loop. The reference computes every score and every scale; what
`generate` computes is `scores`: no scale at all under the common one, and under the documents' only those that bounds leave.

    .venv/bin/python experiments/decisions.py
"""

import torch
from tqdm.auto import tqdm

from causalqwen import PRESETS, CausalDecoding, CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speeches
from causalqwen.decoding import BoundDecoding
from causalqwen.modeling.chain import Chain
from causalqwen.training import text_chunks

STEPS, ROWS = 20_000, 64


@torch.no_grad()
def compare(model: CausalQwenForCausalLM, features: torch.Tensor) -> tuple[int, int]:
    """(steps, equal decisions) over all presets that draw or integrate."""
    names = [name for name in PRESETS if name != "softmax"]
    steps = equal = 0
    for index, z in enumerate(tqdm(features.split(ROWS), leave=False)):
        plan = CausalDecoding.preset(names[index % len(names)], seed=index)
        bound = BoundDecoding.bind(plan, len(z), model.config.causal_size, z.device)
        z, positions = z.unsqueeze(1), torch.full((len(z), 1), index)
        chain = Chain(model, z, bound.at(positions))
        found = chain.ranked()[:, -1].argmax(-1)
        equal += (chain.scores.decide()[:, -1] == found).sum().item()
        steps += len(found)
    return steps, equal


def main() -> None:
    torch.manual_seed(0)
    text = speeches(HELD_OUT_YEARS) + speeches((2002,))
    for name, settings, spread in (
        ("equal", {}, 0.0),
        ("documents, scale_U as at the start", {"start": "documents"}, 0.0),
        ("documents, scale_U 3% apart", {"start": "documents"}, 0.03),
        ("documents, scale_U 30% apart", {"start": "documents"}, 0.3),
        ("minimal, scale_U 3% apart", {"start": "minimal", "score_scale": "documents"}, 0.03),
    ):
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", **settings)
        with torch.no_grad():
            chunks = text_chunks(model, text)
            features = torch.cat([model.features(ids[None]).last_hidden_state[0] for ids in chunks])[:STEPS]
            length = features.norm(dim=-1).mean()
            net = model.abduction.scale_net
            net.weight.normal_(std=(spread * net.bias.mean() / length).item() if spread else 0.0)
        with model.frozen_vocabulary():
            steps, equal = compare(model, features)
            bounds = model.vocabulary().bounds
        share = f", all scales on {bounds.full / bounds.seen:.2%}" if bounds.seen else ""
        print(f"{name:36} {equal:,} of {steps:,} decisions equal{share}", flush=True)


if __name__ == "__main__":
    main()
