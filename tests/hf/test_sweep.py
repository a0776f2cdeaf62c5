"""docs/model_types.md: every causal type of transformers is equal, refused by name or not tried, as the page says."""

from __future__ import annotations

import pytest

from .sweep import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, TABLE, is_of_this_version, line_of, tried

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
pytestmark = pytest.mark.skipif(not is_of_this_version(), reason="docs/model_types.md is of another transformers")


def test_the_page_has_every_type() -> None:
    page = TABLE.read_text(encoding="utf-8")
    assert [name for name in TYPES if page.count(f"`{name}`") != 1] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_what_the_page_says(name: str) -> None:
    row, page = tried(name), TABLE.read_text(encoding="utf-8")
    assert row.result not in ("differs", "failed"), row
    equal = page.partition("## Equal")[2].partition("## Refused")[0]
    if row.result == "equal":
        assert f"`{name}`" in equal
    else:
        assert line_of(row) in page, row
