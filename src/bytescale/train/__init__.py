"""Layer 7: the trainer, its run folder and its metrics. The run folder is also read where torch is not installed."""
