"""How near do drawn individuals come to softmax sampling, by how the tokens read a coordinate? (about 4 minutes)

Total variation between the choices of 400 individuals (`causal`, T = 1, 100 places of held-out speeches) and the softmax, and
the same for 400 softmax samples.

    .venv/bin/python experiments/draws.py
"""

from causalqwen import CausalQwenForCausalLM
from causalqwen.data.texts import HELD_OUT_YEARS, speeches
from causalqwen.evaluation.language import choice_diversity
from causalqwen.training.calibration import CalibrationSettings, fit_draw_unit, summarize_scores, text_chunks


def main() -> None:
    calibration, held_out = speeches((1985,)), speeches(HELD_OUT_YEARS)

    def report(title: str) -> None:
        found = choice_diversity(model, held_out)
        print(f"{title:44}{found['total_variation']:8.3f}{found['sampling_error']:8.3f}", flush=True)

    for family in ("gaussian", "cauchy"):
        model = CausalQwenForCausalLM.from_backbone("smollm2-135m", vocabulary_family=family)
        unit = model.action.draw_unit.clone()
        start = unit * model.get_output_embeddings().weight.std(0)
        report(f"{family}: at the start")
        for factor in (1.3, 1.7):
            model.action.draw_unit.copy_(start.mean() / model.get_output_embeddings().weight.std() * factor)
            report(f"{family}: one unit for all, times {factor}")
            model.action.draw_unit.copy_(factor * unit)
            report(f"{family}: 1/std of each column, times {factor}")
        model.action.draw_unit.copy_(unit)
        facts = summarize_scores(model, text_chunks(model, calibration))
        for seed in range(3):
            model.action.draw_unit.copy_(unit)
            fit_draw_unit(model, facts, CalibrationSettings(seed=seed))
            report(f"{family}: fitted, seed {seed}")


if __name__ == "__main__":
    main()
