"""How often is the OvR decision the backbone's own, for each start, and in bfloat16? (5 minutes)

.venv/bin/python experiments/starts.py
"""

import torch

from causalqwen import STARTS, CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speech_paragraphs
from causalqwen.evaluation import compare_with_backbone


def main() -> None:
    few = speech_paragraphs(numbers=False)[:8]
    many = [paragraph for year in HELD_OUT_YEARS for paragraph in speech_paragraphs(year, numbers=False)]
    runs = [(start, torch.float32, few) for start in STARTS]
    runs += [("faithful", dtype, many) for dtype in (torch.float32, torch.bfloat16)]
    print(f"{'start':12}{'dtype':>10}{'tokens':>8}{'logits identical':>18}{'decision the backbones':>24}")
    for start, dtype, paragraphs in runs:
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", start=start, dtype=dtype)
        found = compare_with_backbone(model, paragraphs)
        name = str(dtype).removeprefix("torch.")
        print(
            f"{start:12}{name:>10}{found['tokens']:8}{found['identical_logits']:18}{found['agreement']:24.4%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
