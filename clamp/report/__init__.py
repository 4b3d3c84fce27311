"""A run as JSON and as one page."""

from clamp.report.page import page_of, write_page
from clamp.report.run import Run, checked, read_run, write_run

__all__ = ["Run", "checked", "page_of", "read_run", "write_page", "write_run"]
