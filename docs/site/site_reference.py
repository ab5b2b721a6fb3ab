"""The reference: the names of docs/api.md with their docstrings, which are plain text and are shown as such."""

import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

_ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.M)
_ITEM = re.compile(r"[`*]*\w+`?(?:, [`*]*\w+`?)*: ")
_SECTIONS = {"Args:", "Returns:", "Raises:", "Attributes:"}


@dataclass(frozen=True)
class Entry:
    """A row of docs/api.md: the name as it stands there, with its module before it, and what is said of it."""

    short: str
    name: str
    said: str


def read_sections(text: str) -> dict[str, list[Entry]]:
    """The sections of docs/api.md, in either language. ValueError for a name that none of its section's modules has."""
    sections = {}
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        modules = re.findall(r"`([\w.]+)`", body.partition("\n")[0])
        sections[title] = [Entry(short, full_name(short, modules), said) for short, said in _ROW.findall(body)]
    return sections


def full_name(short: str, modules: list[str]) -> str:
    """The name behind the first of the modules that has it."""
    for module in modules:
        if hasattr(importlib.import_module(module), short.split(".")[0]):
            return f"{module}.{short}"
    raise ValueError(f"docs/api.md: {short} is in none of {', '.join(modules)}")


def own_members(cls: type) -> list[str]:
    """Public methods and properties that are written, with a docstring, in a class itself."""
    own = []
    for name, found in vars(cls).items():
        code = next((getattr(found, held) for held in ("fget", "func", "__func__") if hasattr(found, held)), found)
        if not name.startswith("_") and inspect.isfunction(code) and code.__doc__ and code.__module__ == cls.__module__:
            own.append(name)
    return own


def directive(entry: Entry, entries: list[Entry]) -> tuple[str, list[Entry]]:
    """What autodoc is asked for, and the members without a row that it then shows."""
    module, _, name = entry.name.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if inspect.isroutine(found):
        return f".. autofunction:: {entry.name}\n", []
    if not inspect.isclass(found):
        return f".. autodata:: {entry.name}\n" + "   :no-value:\n" * (len(repr(found)) > 1000), []
    listed = [other.short.split(".")[1] for other in entries if other.short.startswith(f"{entry.short}.")]
    own = own_members(found)
    shown = [*listed, *(name for name in own if name not in listed)]
    more = [Entry(f"{entry.short}.{name}", f"{entry.name}.{name}", "") for name in shown if name not in listed]
    return f".. autoclass:: {entry.name}\n" + (f"   :members: {', '.join(shown)}\n" if shown else ""), more


def write_reference(folder: Path, english: str) -> list[Entry]:
    """A page for each section of the laid-out page api.md, named after the English section, and a link in every row.

    english: the text of docs/api.md. Returns all names that are shown.
    """
    page = folder / "api.md"
    text = page.read_text(encoding="utf-8")
    shown: list[Entry] = []
    places = []
    for (title, entries), named in zip(read_sections(text).items(), read_sections(english), strict=True):
        lines = [title, "=" * 80, ""]
        shown += entries
        for entry in entries:
            if "." not in entry.short:
                asked, more = directive(entry, entries)
                lines.append(asked)
                shown += more
        places.append("api/" + re.sub(r"\W+", "-", named.lower()))
        file = folder / f"{places[-1]}.rst"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines), encoding="utf-8")
    full = {entry.short: entry.name for entry in shown}
    text = _ROW.sub(lambda row: f"| {{py:obj}}`{row[1]} <{full[row[1]]}>` | {row[2]} |", text)
    listed = "\n".join(places)
    page.write_text(f"{text}\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n", encoding="utf-8")
    return shown


def escape(text: str) -> str:
    """Text in which reStructuredText finds no markup."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


def inline(text: str, known: dict[str, str]) -> str:
    """Plain text with `code` in it, as reStructuredText that shows exactly that; code that is a known name links to it.

    known: names as they are written, to full names.
    """
    parts = re.split(r"`([^`]+)`", text)
    for place, part in enumerate(parts):
        if place % 2 == 0:
            parts[place] = escape(part) if part.strip() else part
        elif part in known:
            parts[place] = rf"\ :py:obj:`{part} <{known[part]}>`\ "
        else:
            parts[place] = rf"\ ``{part.strip()}``\ "
    return "".join(parts)


def as_text(lines: list[str], known: dict[str, str]) -> list[str]:
    """A docstring as reStructuredText: paragraphs, `name: what it is` as lists, formulas as they are.

    Nothing in it is read as markup but `code`: neither *, _ and | of formulas nor what might look like a heading.
    """
    found: list[str] = []
    items: list[list[str]] = []  # lines of the list, or of the one paragraph, that is being read
    section = False

    def listed() -> bool:
        return section or bool(found and _ITEM.match(items[0][0]))  # what comes first is a sentence

    def finish() -> None:
        if found and found[-1]:
            found.append("")
        for item in items:
            text = " ".join(item)
            named = _ITEM.match(text) if listed() else None
            mark = f"- **{escape(named[0].replace('`', '')[:-2])}**: " if named else ""
            found.extend([mark + inline(text[named.end() if named else 0 :], known), ""])
        items.clear()

    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if not text:
            finish()
        elif indent == 0 and text in _SECTIONS:
            finish()
            found.extend([f".. rubric:: {text[:-1]}", ""])
            section = True
        elif section and indent == 0:
            finish()
            section = False
            items.append([text])
        elif not items and (section or indent == 0):
            items.append([text])
        elif not items:
            if not found[-1:] or not found[-1].startswith("   "):
                found.extend(["::", ""])
            found.append(f"   {line}")
        elif indent == 4 * section and _ITEM.match(text) and listed():
            items.append([text])
        else:
            items[-1].append(text)
    finish()
    return found
