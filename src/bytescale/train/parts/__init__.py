"""The parts of a run, built from the config: ranks' model, kernels, memory budget, loader."""
