from __future__ import annotations

import subprocess
import sys


def test_the_floor_needs_neither_torch_nor_ray_and_pyarrow_only_for_parquet() -> None:
    """Machines without them load ``.bin/.idx``, text and JSONL all the same."""
    program = "import sys, bytescale.data, bytescale.cli.data; print({'torch', 'ray', 'pyarrow'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "set()\n"
