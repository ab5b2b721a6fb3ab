"""Break each line of docs/research/mutations.md as the table says, in a copy of the last commit, and run the row's test there.

    .venv/bin/python tests/mutations.py               all rows (an hour on one core)
    .venv/bin/python tests/mutations.py losses.py     the rows whose file or test has that in its name

Ends with 1, and names them, where tests stay green. What each test is run on unchanged is `make check-full`.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "research" / "mutations.md"
_TOKEN = re.compile(r"\w+|[^\w\s]")


def rows() -> list[list[str]]:
    """Test, file, line as it is and as it was changed ("" for a line left out), of each row."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 6 and cells[1].startswith("`"):
            test, file, before, after = (cell.strip("`").strip().replace("\\|", "|") for cell in cells[1:5])
            found.append([test, file, before, "" if after == "left out" else after])
    return found


def changed(source: str, before: str, after: str) -> str:
    """A source with one place changed; the table writes a place in one line, so that spaces and line ends stay the source's."""
    place = re.search(r"\s*".join(map(re.escape, _TOKEN.findall(before))), source)
    if place is None:
        raise ValueError(f"not in the file: {before}")
    old, new = list(_TOKEN.finditer(place[0])), list(_TOKEN.finditer(after))
    steps = difflib.SequenceMatcher(None, [t[0] for t in old], [t[0] for t in new], autojunk=False).get_opcodes()
    made = ""
    for kind, first, end, begin, stop in steps:
        text, tokens = (place[0], old[first:end]) if kind == "equal" else (after, new[begin:stop])
        others = old if kind == "equal" else new
        for token in tokens:
            index = others.index(token)
            made += text[others[index - 1].end() if index else 0 : token.start()] + token[0]
    return source[: place.start()] + made + source[place.end() :]


def stays_green(copy: Path, test: str, file: str, before: str, after: str) -> bool:
    """Whether a test passes on a copy of the repository in which one line is changed."""
    path = copy / ("" if file.startswith("examples/") else "src/causalqwen") / file
    source = path.read_text(encoding="utf-8")
    path.write_text(changed(source, before, after), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-m", "", "-n0", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"]
    try:
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=900).returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(source, encoding="utf-8")


def main() -> int:
    wanted = sys.argv[1:]
    asked = [row for row in rows() if not wanted or any(name in row[0] or name in row[1] for name in wanted)]
    green = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        for number, row in enumerate(asked, 1):
            survives = stays_green(copy, *row)
            green += [row] if survives else []
            print(f"{number}/{len(asked)} {'STAYS GREEN' if survives else 'fails'}: {row[0]}  {row[1]}", flush=True)
    for test, file, before, after in green:
        print(f"stays green: {test}, {file}: {before} -> {after or 'left out'}", file=sys.stderr)
    return 1 if green else 0


if __name__ == "__main__":
    sys.exit(main())
