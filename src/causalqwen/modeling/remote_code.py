"""A file of one import in a checkpoint, for programs that load models by transformers' classes and import nothing themselves.

transformers knows no entry points: what it does not know by name it loads only from a file in the checkpoint, and only with
`trust_remote_code=True`, which runs whatever stands in that file. So no checkpoint has one unless somebody asked for it, what
is written is always this file, byte for byte, and nothing in this library runs it.
"""

import json
from pathlib import Path

from causalqwen.files import write_text

FILE = "with_causalqwen.py"
TEXT = '''"""Loads the installed package causalqwen, whose import makes this model known to transformers, and does no more."""
from causalqwen import CausalQwenConfig, CausalQwenProcessor  # pip install causalqwen
'''
NAMED = {
    "config.json": {"AutoConfig": f"{FILE.removesuffix('.py')}.CausalQwenConfig"},
    "processor_config.json": {"AutoProcessor": f"{FILE.removesuffix('.py')}.CausalQwenProcessor"},
}
"""Where transformers looks; the model's own class is known as soon as its configuration is."""


def write(folder: Path) -> None:
    """Put the file into a saved model, and its name where transformers looks for it."""
    write_text(folder / FILE, TEXT)
    for name, classes in NAMED.items():
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
            write_text(folder / name, json.dumps(settings | {"auto_map": classes}, indent=2, sort_keys=True) + "\n")
