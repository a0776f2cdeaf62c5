"""Decoders of transformers on meshes give the loss, log-probabilities and gradients of plain transformers."""

from __future__ import annotations

import pytest
import torch

from bytescale.parity import Setup, small_model
from bytescale.parity.compare import random_documents
from bytescale.runtime.mesh import MeshShape
from tests.helpers.effort import pairs

from .mesh_steps import compare_on_mesh

FAMILIES = ["qwen3", "gemma2", "glm4", "qwen3_moe", "deepseek_v3", "qwen3_next"]
MESHES = [MeshShape(pp=2, hdp=2), MeshShape(tp=2, hdp=2), MeshShape(pp=2, hdp=2, tp=2)]


@pytest.mark.parametrize(("name", "shape"), pairs(FAMILIES, MESHES))
def test_a_mesh_gives_what_one_process_gives(name: str, shape: MeshShape) -> None:
    model = small_model(name, dtype=torch.float64)
    documents = random_documents(model, Setup(lengths=(37, 1, 8, 3, 24)))
    assert compare_on_mesh(model, documents, shape).worst < 1e-9
