"""What people see of a run: rows, metrics.jsonl, trackers, and the numbers that ranks share for them."""
