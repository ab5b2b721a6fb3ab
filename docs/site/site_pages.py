"""The pages of the site: which file each is made from, in which part it stands, and its text in a language."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

FRONT = "README.md"

PARTS = {
    ("Start", "开始"): ("docs/guide.md",),
    ("Tutorials", "教程"): ("docs/tutorials/*.md",),
    ("How-to", "怎么做"): (
        "docs/training.md",
        "docs/tables.md",
        "docs/serving.md",
        "docs/explore.md",
        "docs/fitting_in.md",
        "docs/reliability.md",
    ),
    ("Ideas", "思想"): ("docs/theory.md", "docs/diagrams.md"),
    ("Reference", "参考"): ("docs/api.md", "CHANGELOG.md"),
    ("Project", "项目"): (
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/research/index.md",
        "docs/research/[!i]*.md",
        "docs/research/experiments/*.md",
    ),
}
"""Part, in both languages, to its files, in order. A pattern may name none; a part without a page is left out."""

RESEARCH = "research/index"
"""One line of the navigation for all pages below its folder."""

LANGUAGES = ("en", "zh")
_SWITCH = re.compile(r"^\[(?:中文|English)\]\([^)]*\)$", re.M)  # the theme has a switch of its own
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


@dataclass(frozen=True)
class Page:
    """One page: its English file below the root, and its address without ending, the same in both languages."""

    file: str
    name: str

    @classmethod
    def of(cls, file: str) -> "Page":
        name = "index" if file == FRONT else file.removeprefix("docs/").removesuffix(".md").lower()
        return cls(file, name)

    def source(self, root: Path, language: str) -> Path:
        """The file in a language: the Chinese one stands beside the English one."""
        own = root / self.file
        return own.with_name(own.stem + ".zh.md") if language == "zh" else own


def find_pages(root: Path) -> dict[tuple[str, str], list[Page]]:
    """Parts with their pages, the front page apart.

    ValueError for a file that is named and is not there, one below docs/ that stands in no part, and a page that lacks its
    other language.
    """
    parts = {}
    for titles, patterns in PARTS.items():
        files = []
        for pattern in patterns:
            found = sorted(str(path.relative_to(root)) for path in root.glob(pattern) if not path.match("*.zh.md"))
            if not found and "*" not in pattern:
                raise ValueError(f"docs/site/site_pages.py: {titles[0]} names {pattern}, which is not there")
            files += found
        if files:
            parts[titles] = [Page.of(file) for file in files]
    pages = [Page.of(FRONT), *(page for part in parts.values() for page in part)]
    sources = {page.source(root, language) for page in pages for language in LANGUAGES}
    for path in sorted((root / "docs").rglob("*.md")):
        if path not in sources:
            raise ValueError(
                f"{path.relative_to(root)} stands in no part of the site: give it one in docs/site/site_pages.py"
            )
    for page in pages:
        chinese = page.source(root, "zh")
        if not chinese.is_file():
            raise ValueError(f"{page.file} lacks its Chinese page, {chinese.name} beside it")
    return parts


def lay_out(root: Path, target: Path, language: str) -> None:
    """Writes the pages of a language below `target`, as Sphinx reads them.

    Lines keep their numbers, so that a warning names the file's own line. Links between files become links between pages;
    a file that is no page is carried along; a link to a folder is left as its words.
    """
    parts = find_pages(root)
    pages = [Page.of(FRONT), *(page for part in parts.values() for page in part)]
    addresses = {page.source(root, own): page.name for page in pages for own in LANGUAGES}
    for page in pages:
        source = page.source(root, language)

        def link(match: re.Match, source: Path = source) -> str:
            bang, words, file, anchor = match.groups(default="")
            path = (source.parent / file).resolve()
            if not file or not path.is_relative_to(root) or not path.exists():
                return match[0]  # an address, or a dead link, of which Sphinx will tell
            if path in addresses:
                return f"{bang}[{words}](/{addresses[path]}.md{anchor})"
            if path.is_dir():
                return words
            carried = target / path.relative_to(root)
            carried.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, carried)
            return f"{bang}[{words}](/{path.relative_to(root)}{anchor})"

        text = _LINK.sub(link, _SWITCH.sub("", source.read_text(encoding="utf-8")))
        if page.name == RESEARCH:
            below = "\n".join("/" + other.name for other in pages if _below_research(other))
            text += f"\n```{{toctree}}\n:hidden:\n\n{below}\n```\n"
        if page.name == "index":
            text += "".join(_contents(titles[LANGUAGES.index(language)], part) for titles, part in parts.items())
        file = target / f"{page.name}.md"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _below_research(page: Page) -> bool:
    return page.name.startswith("research/") and page.name != RESEARCH


def _contents(title: str, pages: list[Page]) -> str:
    names = "\n".join(page.name for page in pages if not _below_research(page))
    return f"\n```{{toctree}}\n:caption: {title}\n:maxdepth: 1\n\n{names}\n```\n"
