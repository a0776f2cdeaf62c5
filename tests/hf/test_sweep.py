"""docs/model_types.md: every causal type of transformers is equal, refused by name or not tried, as the page says."""

from __future__ import annotations

import pytest

from .sweep import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, TABLE, equal_types, is_of_this_version, line_of, meshed, tried

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
pytestmark = pytest.mark.skipif(not is_of_this_version(), reason="docs/model_types.md is of another transformers")


def test_the_page_has_every_type() -> None:
    page = TABLE.read_text(encoding="utf-8")
    assert [name for name in TYPES if page.partition("## On meshes")[0].count(f"`{name}`") != 1] == []


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
def test_a_type_is_on_meshes_what_the_page_says(name: str) -> None:
    row, sections = meshed(name), TABLE.read_text(encoding="utf-8").partition("### Tensor parallelism")[2]
    sections = sections.partition("## Images")[0]
    assert row.result == "equal", row
    for why, section in zip((row.tp, row.pp), sections.split("### Pipelines"), strict=True):
        lines = [line for line in section.splitlines() if f"`{name}`" in line]
        assert [line.endswith(f"| {why.replace('|', ' ')} |") for line in lines] == ([True] if why else [])
