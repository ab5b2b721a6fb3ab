"""What this library costs, and what its numbers are worth beside other methods: run from a checkout, not installed.

python -m benchmarks.speed --help
python -m benchmarks.numbers --help
"""
