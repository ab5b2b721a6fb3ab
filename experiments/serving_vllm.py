"""The vLLM plug-in against `generate` (same tokens?) and against the bare backbone in the same vLLM (tokens per second).

    python experiments/serving_vllm.py same --model runs/demo/model
    python experiments/serving_vllm.py speed --model runs/demo/model --dtype bfloat16
    python experiments/serving_vllm.py speed --model runs/demo/model --dtype bfloat16 --prefix 1000 --tokens 1

In the environment of `make test-vllm`. `speed` runs each engine in a process of its own, on one core or a GPU, and alternates
them. With `--graphs` vLLM compiles both backbones, on a GPU into CUDA graphs: the bare one's of the whole model too.
With `--prefix` the prompts share their first tokens, are asked one after the other, and both engines have prefix caches: the
inverse of its ratio with one token is that of the times to the first token.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ONE_CORE = {
    "VLLM_CPU_OMP_THREADS_BIND": str((os.cpu_count() or 1) - 1),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
SETTINGS = {"softmax": {"temperature": 0.7, "top_p": 0.9}, "persona": {"temperature": 0.7}}
BARE, SAMPLED, IN_PARTS = "bare", "bare, sampled", "bare, piecewise"
NAMES = (
    "water", "toluene (C7H8)", "benzene (C6H6)", "ethanol (C2H6O)", "methane (CH4)", "propane (C3H8)", "acetone (C3H6O)",
    "aniline (C6H7N)", "phenol (C6H6O)", "hexane (C6H14)", "octane (C8H18)", "ammonia (NH3)", "chlorine (Cl2)",
    "naphthalene (C10H8)", "glycerol (C3H8O3)", "styrene (C8H8)",
)  # fmt: skip
FRAMES = (
    "The boiling point of {} is",
    "Water boils at 373.15 K. The boiling point of {} is",
    "We heated 12.5 g of {} to 320 K, and",
    "In 1897, {} was found to boil at",
)
SHARED = "In 1897 the boiling point of water was found to be 373.15 K, and that of ethanol (C2H6O) 351.4 K. "
PROMPTS = [frame.format(name) for frame in FRAMES for name in NAMES]


def same(folder: Path, presets: list[str], tokens: int) -> None:
    """Prints, per preset, how many of 64 texts are those of `generate`, and how far their values are apart."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("vllm", "")]
    from reference import Engines, compare

    from causalqwen.modeling.loading import load_model

    llm, model = Engines()(folder, max_model_len=512), load_model(folder, device="cpu")
    for preset in presets:
        compare(llm, model, preset, PROMPTS, tokens, **SETTINGS.get(preset, {}))


def speed(folder: Path, presets: list[str], rounds: int, asked: list[str]) -> None:
    """Prints the median tokens per second of the bare backbone and of each preset, the median of their ratios, and the numbers.

    The bare backbone takes the best token; beside `softmax` it stands once more, sampled by vLLM with the same settings, and
    with `--graphs` once more with CUDA graphs of its parts alone. Of the core's time, which other programs on the machine do
    not take, and of the clock's.
    """
    names = [BARE, *[IN_PARTS] * ("--graphs" in asked), *[SAMPLED] * ("softmax" in presets), *presets]
    workers = {name: _Worker(folder, name, asked) for name in names}
    for worker in workers.values():
        worker.ask()  # warm
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found[name].append(workers[name].ask())
    for worker in workers.values():
        worker.process.kill()
    for name in names:
        told = []
        for index, of_what in enumerate(("core", "clock")):
            rates, bare = ([pair[index] for pair in found[one]] for one in (name, BARE))
            ratio = statistics.median(one / other for one, other in zip(rates, bare, strict=True))
            spread = f"{min(rates):.0f} to {max(rates):.0f}"
            told.append(f"{statistics.median(rates):.1f} tokens/s of the {of_what} ({spread}), {ratio:.3f} x bare")
        print(f"{name:18} {'; '.join(told)}; {workers[name].numbers} numbers")


class _Worker:
    """An engine in a process; a line in, the tokens per second of a run out, of the core's time and the clock's."""

    def __init__(self, folder: Path, name: str, asked: list[str]) -> None:
        command = [sys.executable, __file__, "work", "--model", str(folder), "--presets", name, *asked]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | ONE_CORE)
        self.numbers = 0

    def ask(self) -> tuple[float, float]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                self.numbers = told["numbers"]
                return tuple(told["rates"])
        raise RuntimeError("the engine's process ended")


def work(folder: Path, preset: str, tokens: int, rows: int, dtype: str, prefix: int, graphs: bool) -> None:
    """One engine, asked by lines of its standard input."""
    import tempfile

    import torch
    from vllm.inputs import TokensPrompt

    import causalqwen_vllm
    from causalqwen import CausalQwenConfig
    from causalqwen.modeling.loading import load_model
    from vllm import LLM, SamplingParams

    engine = {"dtype": dtype, "max_model_len": 512 + prefix, "max_num_seqs": rows, "enable_prefix_caching": prefix > 0}
    engine |= {"enforce_eager": not graphs}
    if torch.cuda.is_available():  # all of them are there at once
        engine |= {"kv_cache_memory_bytes": 2**31, "gpu_memory_utilization": 0.05}
    processor = causalqwen_vllm.client.processor_of(str(folder), CausalQwenConfig.from_pretrained(folder).context)
    bare = preset.startswith(BARE)
    if bare:
        with tempfile.TemporaryDirectory() as own:
            load_model(folder, device="cpu").backbone.save_pretrained(own)
            if preset == IN_PARTS:
                engine["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
            llm = LLM(own, skip_tokenizer_init=True, **engine)
    else:
        llm = causalqwen_vllm.load(str(folder), **engine)
    asked = []
    shared = processor.tokenizer.decode(processor.tokenizer(SHARED * prefix)["input_ids"][:prefix]) if prefix else ""
    keys = [f"row {row}" for row in range(rows)]
    for row, prompt in enumerate(shared + prompt for prompt in PROMPTS[:rows]):
        name = "standard" if bare else preset
        settings = SETTINGS.get(name, {})
        prompt_of, params = causalqwen_vllm.request(
            processor,
            prompt,
            preset=name,
            seed=row,
            max_tokens=tokens,
            key=keys[row],
            params={"ignore_eos": True},
            **settings,
        )
        if bare:
            ids = [min(token, processor.num_token_id - 1) for token in prompt_of["prompt_token_ids"]]
            prompt_of = TokensPrompt(prompt_token_ids=ids)
            drawn = {"seed": row, **SETTINGS["softmax"]} if preset == SAMPLED else {"temperature": 0.0}
            params = SamplingParams(detokenize=False, max_tokens=tokens, ignore_eos=True, **drawn)
        asked.append((prompt_of, params))
    for _ in sys.stdin:
        start, busy = time.perf_counter(), time.process_time()
        together = [asked] if not prefix else [[one] for one in asked]
        outputs = []
        for part in together:
            outputs += llm.generate([prompt for prompt, _ in part], [params for _, params in part], use_tqdm=False)
        taken = [] if bare else llm.collective_rpc("take_numbers", args=(keys,))[-1]
        done = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates = done / (time.process_time() - busy), done / (time.perf_counter() - start)
        print(json.dumps({"rates": rates, "numbers": sum(map(len, taken))}), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("same", "speed", "work"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--presets", nargs="+")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prefix", type=int, default=0)
    parser.add_argument("--graphs", action="store_true")
    given = parser.parse_args()
    if given.what == "same":
        from causalqwen import PRESETS

        same(given.model, given.presets or list(PRESETS), given.tokens)
    elif given.what == "speed":
        asked = ["--tokens", str(given.tokens), "--rows", str(given.rows), "--dtype", given.dtype]
        asked += ["--prefix", str(given.prefix), *["--graphs"] * given.graphs]
        speed(given.model, given.presets or ["standard", "persona"], given.rounds, asked)
    else:
        work(given.model, given.presets[0], given.tokens, given.rows, given.dtype, given.prefix, given.graphs)


if __name__ == "__main__":
    main()
