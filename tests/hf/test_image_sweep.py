"""docs/model_types.md: images, videos and sounds of every type of transformers are what the page says."""

from __future__ import annotations

import pytest

from .image_sweep import SECTION, TYPES, line_of, section, tried, tried_kind
from .sweep import TABLE, is_of_this_version

pytestmark = pytest.mark.skipif(not is_of_this_version(), reason="docs/model_types.md is of another transformers")


def test_the_page_has_every_type() -> None:
    page = TABLE.read_text(encoding="utf-8").partition(SECTION)[2]
    assert [name for name in TYPES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", ["qwen2_5_omni_thinker", "voxtral"])
def test_sounds(name: str) -> None:
    """One has positions of its own for them."""
    assert tried_kind(name, "audio").result == "equal"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_what_the_page_says(name: str) -> None:
    rows, page = list(tried(name)), TABLE.read_text(encoding="utf-8").partition(SECTION)[2]
    titles = {"image": "Images equal", "video": "Videos equal", "audio": "Sounds equal", "text": "Text alone equal"}
    assert section(rows)  # nothing differs, and nothing fails
    seen = any(row.result == "equal" for row in rows if row.kind != "text")
    for row in rows:
        if row.result != "equal":
            assert line_of(row) in page, row
        elif row.kind != "text" or not seen:
            assert f"`{name}`" in page.partition(f"### {titles[row.kind]}")[2].partition("###")[0], row
