"""A server that clients of Thinking Machines' Tinker API can train and sample with (``bytescale serve``)."""
