"""The site in both languages, from README.md and docs/, without a network: `make site`.

    python docs/site/make_site.py build/site

It appears there if Sphinx gave no warning, every page has both languages, and no link is dead.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from site_check import check_site
from site_pages import LANGUAGES, lay_out
from site_reference import write_reference

HERE = Path(__file__).resolve().parent
SPHINX_LANGUAGE = {"en": "en", "zh": "zh_CN"}


def build(root: Path, output: Path) -> list[str]:
    """Builds the site of the repository at `root` as the folder `output`, unless there is an error; returns the errors.

    Sphinx tells its warnings itself. ValueError for pages that do not fit together (`find_pages`), and for an output that is
    there and is no site.
    """
    if output.exists() and not (output / ".buildinfo").is_file():
        raise ValueError(f"{output} is there and is no site: expected the folder of one, or none")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f"{output.name}-") as made:
        site = Path(made) / "html"
        for language in LANGUAGES:
            print(f"{language}: reading and writing pages (about ten seconds)", file=sys.stderr)
            sources = Path(made) / language
            lay_out(root, sources, language)
            entries = write_reference(sources, (root / "docs" / "api.md").read_text(encoding="utf-8"))
            if language == "zh":
                words = sources / "locales" / "zh_CN" / "LC_MESSAGES" / "sphinx.po"
                words.parent.mkdir(parents=True)
                shutil.copy(HERE / "zh.po", words)
            settings = {
                "language": SPHINX_LANGUAGE[language],
                "entries": [(entry.short, entry.name, entry.said) for entry in entries],
            }
            place = site if language == "en" else site / language
            with patch_docutils(str(HERE)), docutils_namespace():
                app = Sphinx(
                    sources,
                    HERE,
                    place,
                    Path(made) / f"{language}-read",
                    "html",
                    settings,
                    status=None,
                    warning=sys.stderr,
                    warningiserror=True,
                )
                app.build()
            if app.statuscode:
                return [f"{language}: Sphinx warned (see above)"]
        errors = check_site(site)
        if not errors:
            if output.exists():
                shutil.rmtree(output)
            site.rename(output)
    return errors


if __name__ == "__main__":
    output = Path(sys.argv[1])
    try:
        errors = build(HERE.parent.parent, output)
    except ValueError as error:
        errors = [str(error)]
    if errors:
        sys.exit("\n".join(errors))
    counts = [len([*(output / place).rglob("*.html")]) for place in ("", "zh")]
    print(f"{output / 'index.html'}: {counts[0] - counts[1]} pages in English, {counts[1]} in Chinese; no dead link")
