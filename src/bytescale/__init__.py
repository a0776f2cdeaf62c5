"""bytescale: hybrid data parallel (HDP) training on mixed short and very long sequences.

An implementation of ByteScale (Ge et al., SIGCOMM 2025, arXiv 2502.21231). The floors, lowest first, are
``common``; ``config`` and ``plan``; ``cost`` and ``attention``; ``planner`` and ``models``; ``simulator``,
``data`` and ``runtime``; ``train``; ``cli``. A module imports lower floors only (docs/architecture.md).
"""

__version__ = "0.1.0"
