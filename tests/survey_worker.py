"""One of several processes that ask the people of a file, each its share of them, the last one first."""

import json
import os
import sys
from pathlib import Path

from causalqwen import Population
from causalqwen.data.people import read_questions
from causalqwen.modeling.loading import load_model
from causalqwen.modeling.survey import survey_rows

model, population, questions, output = sys.argv[1:]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
people = Population.load(population)
own = people.part(list(range(rank, len(people), ranks))[::-1])
rows = survey_rows(load_model(model, "cpu"), own, read_questions(questions)[::-1], draws=2, seed=5)
Path(output).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
