"""The remote loader (paper section 7).

Servers on every node read and tokenise. A rank draws and plans as with the local loader (``data.loading.loader``). It
asks servers for two things: what the parts of the corpus contain, and the token ranges of its slices.

A server tokenises its share of the shards. After ``kill -9`` it is started again, and finds its finished work in the
cache. Ray does the rest: it places, finds, restarts and ends servers, repeats calls that were under way, and moves
arrays through shared memory. Only this package imports Ray.
"""

import os

# Ray reads these variables once, when it is imported, so they are set here. Without the first, Ray would replace
# 127.0.0.1 by the machine's public address and offer its ports to the network. The second stops Ray's usage reports.
# The third gives actors of a Ray of our own the priority of other processes. Ray's default is 15, and on busy cores
# ranks then wait for servers that get no time.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
