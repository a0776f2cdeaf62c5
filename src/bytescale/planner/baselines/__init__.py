"""Planners to compare with: a static mesh, the paper's two algorithms, and a greedy form of the second one."""
