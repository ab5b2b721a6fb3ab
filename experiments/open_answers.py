"""Do words alone tell what people will answer? The Twin-2K mega-study of experiments/twins.py, people known by nothing but what
they wrote: their open answers in the other studies (a quarter of an hour on two cores).

Each answer is read by the backbone, and the mean of its features is taken less the mean over all who answered the same
question, so that the question itself tells nothing. A person is the mean of their answers, one from the target study left out;
ridge regression tells each outcome from it, in five folds over people. Its penalty is chosen on the ten studies of twins.py.
Beside it the same from word counts, from how much somebody wrote, and from nothing. Correlations are also taken within folds:
across them the mean of the other folds is low where that of the fifth is high, and whoever tells nothing is below 0.

Of words, the model itself says that they told it nothing about numbers (theory 3.14); this asks whether there is anything to
learn. DIR holds the three files of twins.py; ANSWERS is the folder `.dat` of the same repository.

    .venv/bin/python experiments/open_answers.py --data DIR --answers ANSWERS
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import sparse
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from tqdm.auto import tqdm
from twins import CHOSEN_ON, FOLDS, PEOPLE, Study, correlation

from causalqwen import CausalQwenForCausalLM
from causalqwen.modeling.backbones import reading

FOLDERS = {
    "affective_priming": "Affective Primes",
    "digital_certification": "Digital certificates for luxury consumption",
    "idea_generation": "idea generation",
    "obedient_twins": "Obedient twins",
    "promiscuous_donors": "Promiscuous donors",
    "quantitative_intuition": "quantitative intuition",
    "story_beliefs": "Story Beliefs",
    "targeting_fairness": "Targeting fairness",
}
NO_ANSWERS = ("perPagePT", "att_check1", "att_check2")
PENALTIES = (1.0, 10.0, 100.0, 1000.0, 10_000.0)


def answers(folder: Path) -> pd.DataFrame:
    """Open answers of four words or more in the median, few of them alike: person, study, question, text."""
    found = []
    for name, study in FOLDERS.items():
        table = pd.read_csv(folder / name / "raw_data" / "response.csv", dtype=str, low_memory=False).iloc[2:]
        table = table[pd.to_numeric(table["TWIN_ID"], errors="coerce").notna()]
        for question in table.columns.difference(NO_ANSWERS, sort=False):
            said = table[question].dropna()
            typical = said.str.split().str.len().median()
            marked = said.str.contains(r"http|\{|\d{4}-").mean() > 0.3
            if len(said) >= 50 and typical >= 4 and said.nunique() > 0.6 * len(said) and not marked:
                people = table.loc[said.index, "TWIN_ID"].astype(float)
                found.append(pd.DataFrame({"person": people, "study": study, "question": question, "text": said}))
    return pd.concat(found, ignore_index=True).drop_duplicates(["person", "study", "question"])


@torch.no_grad()
def features(model: CausalQwenForCausalLM, texts: list[str]) -> np.ndarray:
    """The mean of z over each text, [n, H]."""
    made = np.zeros((len(texts), model.config.hidden_size), dtype=np.float32)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    tokenizer = model.processor.tokenizer
    with reading(model):
        for start in tqdm(range(0, len(order), 32), "reading", leave=False):
            places = order[start : start + 32]
            batch = tokenizer(
                [texts[place] for place in places], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            hidden = model.features(batch["input_ids"], batch["attention_mask"]).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            made[places] = ((hidden * mask).sum(1) / mask.sum(1).clamp(min=1)).float().numpy()
    return made


def persons(said: pd.DataFrame, columns: np.ndarray, people: np.ndarray, without: str) -> tuple[np.ndarray, np.ndarray]:
    """Of each person the mean of their answers in the other studies, each less its question's, [people, K]; and who has any."""
    kept = (said["study"] != without).to_numpy()
    part, rows = said[kept], columns[kept]
    question = pd.factorize(part["study"] + "/" + part["question"])[0]
    means = np.stack([rows[question == one].mean(0) for one in range(question.max() + 1)])
    spread = (rows - means[question]).std(0).clip(min=1e-6)
    place = {person: at for at, person in enumerate(people)}
    of = part["person"].map(place)
    there = of.notna().to_numpy()
    summed, counts = np.zeros((len(people), columns.shape[1])), np.zeros(len(people))
    np.add.at(summed, of[there].astype(int), ((rows - means[question]) / spread)[there])
    np.add.at(counts, of[there].astype(int), 1)
    return summed / np.maximum(counts, 1)[:, None], counts > 0


def told(
    study: Study, said: pd.DataFrame, columns: np.ndarray, people: np.ndarray, fold: np.ndarray
) -> dict[float, np.ndarray]:
    """What ridge regression of each penalty says of every hidden answer, and the mean alone (an infinite one)."""
    found = {penalty: np.full_like(study.answers, np.nan) for penalty in (*PENALTIES, np.inf)}
    for name in study.names:
        x, known = persons(said, columns, people, name)
        for place in np.flatnonzero(study.studies == name):
            answered = np.isfinite(study.answers[:, place]) & known
            for number in range(FOLDS):
                taught, asked = answered & (fold != number), answered & (fold == number)
                y = study.answers[taught, place]
                left, sizes, right = np.linalg.svd(x[taught] - x[taught].mean(0), full_matrices=False)
                for penalty in found:
                    slopes = right.T @ (sizes / (sizes**2 + penalty) * (left.T @ (y - y.mean())))
                    found[penalty][asked, place] = y.mean() + (x[asked] - x[taught].mean(0)) @ slopes
    return found


def within(fold: np.ndarray, left: np.ndarray, right: np.ndarray) -> float:
    """The correlation within folds, averaged."""
    return float(np.mean(np.nan_to_num([correlation(left[fold == one], right[fold == one]) for one in range(FOLDS)])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    study = Study.read(given.data)
    people = pd.read_csv(given.data / PEOPLE, usecols=["TWIN_ID"])["TWIN_ID"].to_numpy()
    said = answers(given.answers)
    fold = np.random.default_rng(given.seed).permutation(len(people)) % FOLDS
    texts = said["text"].tolist()
    questions = said.groupby(["study", "question"]).ngroups
    print(f"{len(said):,} answers to {questions} questions by {said['person'].nunique():,} people")
    model = CausalQwenForCausalLM.from_backbone("smollm2-135m")
    words: sparse.csr_matrix = TfidfVectorizer(min_df=5, sublinear_tf=True).fit_transform(texts)
    length = np.log1p([len(text.split()) for text in texts])
    ways: dict[str, Callable[[], np.ndarray]] = {
        "the backbone's features": lambda: features(model, texts),
        "word counts, 200 components": lambda: TruncatedSVD(200, random_state=0).fit_transform(words),
        "how much was written": lambda: length[:, None],
    }
    chosen_on = np.isin(study.studies, CHOSEN_ON)
    print(f"\n{'told from':30}{'penalty':>9}{'correlation':>13}{'within folds':>14}{'ten':>8}{'nine':>8}")
    for label, way in ways.items():
        by_penalty = told(study, said, way(), people, fold)
        each = {
            penalty: np.array([
                [f(one[:, place], study.answers[:, place]) for f in (correlation, lambda a, b: within(fold, a, b))]
                for place in range(len(study.outcomes))
            ])
            for penalty, one in by_penalty.items()
        }  # fmt: skip
        each = {penalty: np.nan_to_num(one) for penalty, one in each.items()}
        best = max(PENALTIES, key=lambda penalty: each[penalty][chosen_on, 1].mean())
        for name, penalty in ((label, best), ("nothing, the mean", np.inf)):
            one = each[penalty]
            print(
                f"{name:30}{penalty:9g}{one[:, 0].mean():13.3f}{one[:, 1].mean():14.3f}"
                f"{one[chosen_on, 1].mean():8.3f}{one[~chosen_on, 1].mean():8.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
