"""A run as JSON and as one page."""

from clamp.debug.page.schema import Run, checked, read_run, write_run
from clamp.debug.page.sections import page_of, write_page

__all__ = ["Run", "checked", "page_of", "read_run", "write_page", "write_run"]
