"""N-grams of words: the sparse facts that regressions on texts read (docs/tables.md)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from causalqwen.extras import extra

with extra("tables", "a table"):
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer

KINDS: tuple[dict[str, Any], ...] = (
    {"analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 2, "max_features": 60_000},
    {"analyzer": "word", "ngram_range": (1, 2), "token_pattern": r"\S+", "max_features": 60_000},
)
_OF_FITTING = ("min_df", "max_features")


@dataclass
class Grams:
    """TF-IDF of character and word n-grams.

    vocabularies: of each kind of n-grams, its place in `KINDS` first; none where no n-gram stands often enough. idf: float32 of
    each of them, by kind.
    """

    vocabularies: list[list[str]] = field(default_factory=list)
    idf: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def fit(cls, words: Sequence[str]) -> "Grams":
        """The n-grams of some texts."""
        made = cls()
        for place, settings in enumerate(KINDS):
            try:
                vectorizer = TfidfVectorizer(sublinear_tf=True, **settings).fit(words)
            except ValueError:  # not one gram that stands often enough
                continue
            made.vocabularies.append([str(place), *(str(gram) for gram in vectorizer.get_feature_names_out())])
            made.idf[str(place)] = vectorizer.idf_.astype(np.float32)
        return made

    @property
    def width(self) -> int:
        """How many n-grams."""
        return sum(len(one) - 1 for one in self.vocabularies)

    def counts(self, words: Sequence[str]) -> sparse.csr_matrix | None:
        """The n-grams of texts, [n, width], each kind of length 1; None where there are none."""
        parts = []
        for place, *grams in self.vocabularies:
            settings = {name: value for name, value in KINDS[int(place)].items() if name not in _OF_FITTING}
            reader = TfidfVectorizer(sublinear_tf=True, vocabulary=grams, **settings)
            reader.idf_ = self.idf[place].astype(np.float64)
            parts.append(reader.transform(words))
        return sparse.hstack(parts).tocsr() if parts else None
