"""Where text lies: files, folders and URLs, and how their records are read."""
