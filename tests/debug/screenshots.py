"""Takes the documents' pictures of the page: ``python -m tests.debug.screenshots docs/pictures``."""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from clamp.report import write_page
from tests.debug.browser import Browser, open_browser
from tests.debug.sample import sample_run

WIDTH = 1200
#: name -> scheme, the first section to be seen, the last
PICTURES = {
    "report": ("light", "verdict", "timeline"),
    "report-dark": ("dark", "ranges", "ranges"),
}


def take(browser: Browser, first: str, last: str) -> Image.Image:
    """A picture of some sections."""
    top, bottom = browser.run(
        """const edges = [...arguments].map(id => document.getElementById(id).getBoundingClientRect());
        return [edges[0].top + scrollY, edges[1].bottom + scrollY]""",
        first,
        last,
    )
    clip = {"x": 0, "y": top - 16, "width": WIDTH, "height": bottom - top + 32, "scale": 1}
    taken = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    picture = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    return picture.quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)  # a third of the bytes


def main(folder: Path) -> None:
    """Takes them all."""
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "run.html"
        write_page(sample_run(), page)
        with open_browser(Path(scratch) / "profile") as browser:
            for name, (scheme, first, last) in PICTURES.items():
                browser.open(page, WIDTH, scheme)
                take(browser, first, last).save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
