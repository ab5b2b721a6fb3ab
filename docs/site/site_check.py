"""What a reader would stumble over: dead links, pages without their other language, whatever a network is asked for."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"]|\bfetch\(\s*['\"]|\bfrom\s+['\"])((?:https?:)?//[^'\")\s]+)")
CLICKS = 2


class PageReader(HTMLParser):
    """A page's anchors, its language and title, the addresses that it links to, and those that a browser fetches with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.fetched, self.others = {""}, [], [], []
        self.language = self.title = ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "html":
            self.language = found.get("lang", "")
        self._in_title = tag == "title" and not self.title
        address = found.get("href", found.get("xlink:href"))
        if tag == "link" and found.get("rel") == "alternate":
            self.others.append(address)
        if tag == "a" and address is not None:
            self.links.append(address)
        elif tag in ("link", "use", "image") and address is not None:
            self.fetched.append(address)
        self.fetched += [found[name] for name in ("src", "data", "poster") if tag != "a" and name in found]
        self.fetched += re.findall(r"(\S+)(?:\s+[\d.]+[wx])?(?:,|$)", found.get("srcset", ""))
        self.fetched += _FETCHED.findall(found.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data.strip()

    def handle_endtag(self, tag: str) -> None:
        self._in_title = False


def check_site(site: Path) -> list[str]:
    """Errors of the built site, English at its root and Chinese in zh/; none where all is well.

    Each link to a file and an anchor in it leads somewhere, as does all that a page loads; nothing is loaded from a network;
    every page exists in both languages, says its own, and leads to the other; and from index.html at most two clicks lead
    to every page of its language.
    """
    pages = {
        path.relative_to(site).as_posix(): PageReader(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    errors = []
    leads = {name: set() for name in pages}
    for name, page in pages.items():
        chinese = name.startswith("zh/")
        if page.language != ("zh-CN" if chinese else "en"):
            errors.append(f"{name}: in the language {page.language or 'of nobody'}")
        if not page.title:
            errors.append(f"{name}: no title")
        for address in [*page.links, *page.fetched, *page.others]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.fetched and parts.scheme != "data":
                    errors.append(f"{name}: {address} is fetched from a network")
                continue
            path = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = path.resolve()
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                errors.append(f"{name}: {address} leads nowhere")
                continue
            other = target.relative_to(site.resolve()).as_posix()
            if other in pages:
                leads[name].add(other)
                if unquote(parts.fragment) not in pages[other].anchors:
                    errors.append(f"{name}: {address} leads to no place in {other}")
        twin = name.removeprefix("zh/") if chinese else f"zh/{name}"
        if twin not in pages:
            errors.append(f"{name}: there is no {twin}")
        elif twin not in leads[name]:
            errors.append(f"{name}: nothing leads to {twin}")
    for path in [*site.rglob("*.css"), *site.rglob("*.svg"), *site.rglob("*.js")]:
        errors += [
            f"{path.relative_to(site)}: {found} is fetched from a network"
            for found in _FETCHED.findall(path.read_text("utf-8"))
        ]
    for front in ("index.html", "zh/index.html"):
        near = {front}
        for _ in range(CLICKS):
            near |= {
                to for name in near for to in leads.get(name, ()) if to.startswith("zh/") == front.startswith("zh/")
            }
        mine = {name for name in pages if name.startswith("zh/") == front.startswith("zh/")}
        errors += [f"{name}: more than {CLICKS} clicks from {front}" for name in sorted(mine - near)]
    return errors
