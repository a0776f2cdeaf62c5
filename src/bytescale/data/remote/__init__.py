"""The remote loader (paper section 7).

Servers read and tokenise, a planner on each node plans, and ranks fetch only their slices.

==========  ==========================================================================================================
who         what it does, and how it recovers after ``kill -9``
==========  ==========================================================================================================
server      It tokenises its share of the shards, reports document lengths and sends token ranges. After a restart it
            finds its finished work in the cache.
planner     One on every node. It draws, plans and verifies the batches that the ranks of its node ask for. After a
            restart it asks the servers for the lengths again. Every request says where its step starts, how to plan,
            and with which costs.
client      It lives in a training rank. It gets the rank's part of the plan, and fetches the token ranges of that part,
            some steps ahead of training.
==========  ==========================================================================================================

Ray does the rest. It places, finds, restarts and ends actors, repeats calls that were under way, and moves arrays
through shared memory. Only this package and the launcher of ``--launch ray`` import Ray.
"""

import os

# Ray reads these variables once, when it is imported, so they are set here. Without the first, Ray would replace
# 127.0.0.1 by the machine's public address and offer its ports to the network. The second stops Ray's usage reports.
# The third gives actors of a Ray of our own the priority of other processes. Ray's default is 15, and on busy cores
# ranks then wait for a planner and servers that get no time.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
