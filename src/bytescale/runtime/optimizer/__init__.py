"""Parameters in flat memory, and optimizers whose states are sharded over ranks."""
