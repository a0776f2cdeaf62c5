"""Layer 1: the settings. Dataclasses, presets, TOML in and out, and every check that needs no data and no torch."""

from bytescale.config.schema import DataConfig as DataConfig  # what HDP.batches takes
