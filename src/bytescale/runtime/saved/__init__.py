"""What layers keep for backward: computed again, sent to host memory, or kept."""
