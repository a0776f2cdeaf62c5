"""Where files lie, here or behind a URL: one way to open, read, list, write and remove them, and to try again."""
