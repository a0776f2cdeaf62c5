"""The report of one or several runs: one HTML file that needs no network. Nothing here imports torch."""

from bytescale.report.page import report_page
from bytescale.report.runs import read_runs

__all__ = ["read_runs", "report_page"]
