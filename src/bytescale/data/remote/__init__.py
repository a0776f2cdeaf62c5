"""The remote loader (paper section 7): servers read and tokenise, one planner plans, ranks fetch just their slices.

==========  ==========================================================================================================
actor       what it does; what it needs to come back after ``kill -9``
==========  ==========================================================================================================
server      tokenises its share of the shards, reports document lengths, sends token ranges; finds its work in the cache
planner     draws, plans and verifies global batches ahead and publishes each once; asks servers for lengths again, and
            every request says where its step starts
relay       asks the planner once for all ranks of its node (where there are several nodes) and cuts their parts; asks
            again
client      lives in a training rank: gets its part of the plan and fetches the token ranges in it, some steps ahead
==========  ==========================================================================================================

Ray does the rest: it places, finds, restarts and ends actors, retries calls that were under way, and moves arrays
through shared memory. Only this package (and the launcher of ``--launch ray``) imports it.
"""

import os

# Read once, when Ray is imported, hence here: without the first, Ray takes 127.0.0.1 for the machine's public address
# and offers its ports to the network; with the second it reports nothing to anybody.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
