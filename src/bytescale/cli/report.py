"""``bytescale report``: one HTML file about one or several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bytescale.common.atomic import whole_file
from bytescale.common.errors import ConfigError
from bytescale.common.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Report runs: bytescale report RUN [RUN ...] --out FILE.html. The file needs no network.

    It shows loss, throughput and where the time went, lengths and degrees, memory, predictions, and what would help.
    Runs that still go on or were killed are reported as far as they came.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders. Several are shown side by side."""
    out: Path = Path("report.html")
    """The HTML file to write. An older file of this name is replaced."""

    def run(self) -> int:
        from bytescale.report import read_runs, report_page

        out = self.out.absolute()
        if not out.parent.is_dir():
            raise ConfigError(
                f"the folder {out.parent} of --out {self.out} does not exist",
                so="the report could not be written",
                fix="make the folder, or name another file",
            )
        runs = read_runs(self.runs)
        for one in runs:
            print("\n  ".join([f"{one.name}: {one.state_text}", *one.notes]))
        with whole_file(out) as temporary:
            temporary.write_text(report_page(runs), encoding="utf-8")
        print(f"wrote {self.out} ({format_bytes(out.stat().st_size)}): open it in a browser")
        return 0
