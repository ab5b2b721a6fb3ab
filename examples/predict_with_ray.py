"""Numbers predicted on many machines: each worker holds the model, Ray hands them the rows (pip install 'causalqwen[ray]').

python examples/predict_with_ray.py --model DIR --input rows.jsonl --output predictions [--workers 2]
"""

import argparse

import ray

from causalqwen.evaluation import TablePredictor

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="folder of a grafted model, the same on every machine")
parser.add_argument("--input", required=True, help="JSONL or Parquet: a file or a folder")
parser.add_argument("--output", required=True, help="folder for Parquet files")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--cpus", type=float, default=1, help="per worker; leave one for reading")
parser.add_argument("--gpus", type=float, default=0, help="per worker")
given = parser.parse_args()

read = ray.data.read_parquet if given.input.endswith(".parquet") else ray.data.read_json
predicted = read(given.input).map_batches(
    TablePredictor,
    fn_constructor_args=[given.model],
    batch_format="pyarrow",
    batch_size=256,
    concurrency=given.workers,
    num_cpus=given.cpus,
    num_gpus=given.gpus,
)
predicted.write_parquet(given.output)
