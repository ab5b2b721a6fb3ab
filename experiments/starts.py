"""How often is the OvR decision the backbone's own, for each start? (1 minute)

.venv/bin/python experiments/starts.py
"""

from causalqwen import STARTS, CausalQwenForCausalLM
from causalqwen.data.texts import speech_paragraphs
from causalqwen.evaluation import compare_with_backbone


def main() -> None:
    paragraphs = speech_paragraphs(numbers=False)[:8]
    print(f"{'start':12}{'tokens':>8}{'logits identical':>18}{'decision the backbones':>24}")
    for start in STARTS:
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", start=start)
        found = compare_with_backbone(model, paragraphs)
        print(f"{start:12}{found['tokens']:8}{found['identical_logits']:18}{found['agreement']:24.1%}", flush=True)


if __name__ == "__main__":
    main()
