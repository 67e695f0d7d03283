"""Make a PDF of the whole book from the built site: python tools pdf OUT.pdf

Chromium prints the page that one_page.py makes: once to learn on which page everything
comes to stand, and again with these numbers in it. If there is no site, it is built.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, Page
from pypdf import PdfReader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run by its path

from bookkit.chapters import parser, run
from build_book import build_if_missing
from editions.one_page import document
from site_browser import launched

# What is wider than the paper is drawn smaller.
SHRINK = """() => {
  for (const box of document.querySelectorAll(
      "mjx-container, .table-scroll, .output.text_html")) {
    const room = box.parentElement.clientWidth || box.clientWidth;
    const need = Math.max(box.scrollWidth, box.firstElementChild?.scrollWidth ?? 0,
      box.firstElementChild?.getBoundingClientRect().width ?? 0);
    if (room && need > room + 1) box.style.zoom = room / need;
  }
}"""
NUMBER = """(pages) => {
  for (const place of document.querySelectorAll("[data-target]"))
    place.textContent = pages[place.dataset.target];
}"""


def print_twice(page: Page, out: Path) -> None:
    """Print, read where everything came to stand, and print with the page numbers."""
    options = {"path": out, "prefer_css_page_size": True, "print_background": True}
    page.pdf(**options)
    reader = PdfReader(out)
    numbers = {
        name.removeprefix("/"): reader.get_destination_page_number(target) + 1
        for name, target in reader.named_destinations.items()
    }
    page.evaluate(NUMBER, numbers)
    page.pdf(**options, outline=True, tagged=True)
    print(f"{out}: {len(reader.pages)} pages, {out.stat().st_size / 1e6:.1f} MB")


def make(browser: Browser, out: Path, site: Path, only: list[str] | None = None) -> None:
    """The PDF of a built site, or of some of its pages."""
    page = browser.new_page(viewport={"width": 627, "height": 960})  # A4's text
    page.set_default_timeout(300_000)
    page.emulate_media(media="print")
    with TemporaryDirectory() as folder:
        html = Path(folder, "book.html")
        html.write_text(document(site, only), encoding="utf-8")
        page.goto(html.as_uri())
        page.evaluate("() => MathJax.startup.promise")
        page.evaluate(SHRINK)
        print_twice(page, out)
    page.close()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("out", type=Path, metavar="OUT.pdf")
    args = options.parse_args()
    build_if_missing(args.root)
    with launched() as browser:
        make(browser, args.out, args.root / "_build" / "html")
    return 0


if __name__ == "__main__":
    run(main)
