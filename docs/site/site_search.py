"""Search in Chinese without a dictionary: texts and queries are cut into pairs of neighbouring characters alike."""

import re
from itertools import pairwise

from sphinx.search.en import SearchEnglish


class ChineseSearch(SearchEnglish):
    """Any two neighbouring characters are a word of the index, and so is each alone; words in Latin letters are English."""

    lang = "zh"  # language_name stays English: by it the stemmer is called
    js_splitter_code = r"""
function splitQuery(query) {
  return (query.match(/[\u3400-\u9fff]+|[^\s\u3400-\u9fff]+/g) || []).flatMap((run) =>
    /[\u3400-\u9fff]/.test(run)
      ? run.length === 1 ? [run] : Array.from({ length: run.length - 1 }, (_, at) => run.slice(at, at + 2))
      : run.split(/[^\p{Letter}\p{Number}_]+/u).filter(Boolean));
}
"""

    def split(self, input: str) -> list[str]:
        words = []
        for run in re.findall(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+", input):
            chinese = "\u3400" <= run[0] <= "\u9fff"
            words += [*run, *map("".join, pairwise(run))] if chinese else [run]
        return words
