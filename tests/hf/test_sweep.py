"""docs/model_types.md: every causal type of transformers is equal, refused by name or not tried, as the page says."""

from __future__ import annotations

import pytest

from .sweep import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, TABLE, cut, equal_types, is_of_this_version, line_of, tried

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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", equal_types(TABLE.read_text(encoding="utf-8")))
def test_a_type_is_cut_as_the_page_says(name: str) -> None:
    row, section = cut(name), TABLE.read_text(encoding="utf-8").partition("## Tensor parallelism")[2]
    assert row.result in ("equal", "refused"), row
    assert (f"- {name}: {row.why}\n" in section) if row.result == "refused" else (f"- {name}: " not in section)
