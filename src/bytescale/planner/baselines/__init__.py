"""Planners to compare with: a static mesh, and the paper's two algorithms."""
