"""How long the adaptive planner searches, and when it is content (docs/decisions/planner.md has what it buys)."""

from __future__ import annotations

# When to stop.
GOOD_ENOUGH = 1.009
"""A makespan within this factor of the target ends the search: ordinary batches end with the first or second trial."""
GOOD_ENOUGH_UNEQUAL = 1.015
"""The same factor for ranks that differ, where an attempt takes ten times as long."""
CLOSE = 1.002
"""Makespans within this factor of each other count as equal. Of such trials, that with the least traffic is taken."""
PRECISION = 1.002
"""The target's lower and upper bound differ by at most this factor."""

# What is tried without a pipeline.
FIRST, LATER = 1.004, 1.008
"""Makespans that the first trial and later ones aim at, over the target: whole sequences end a little later."""
WHOLE_SLOTS = (0.0, 0.3, 0.6)
"""Shares of a slot that a group takes besides its own ranks, if these are the rest of it. Without any, makespans are
0.4 to 0.6 % later, 2.2 % in pipelines, 38 % at worst."""
PARTS = (1, 4, 16, 64)
"""The target over the longest blocks tried. With the first alone, 400 equal sequences on 16 ranks end 2.6 % late."""
ODD_ONES = (1.004, 1.01, 1.02, 1.05)
"""Makespans, over the target, of trials in which equal sequences stay whole, but for those that some ranks would have
one more of. Without them, R + 1 equal sequences on R ranks end 19 to 100 % late."""
ODD_BLOCKS = 16_384
"""Groups in all of these trials."""
MANY_A_RANK = 16
"""Whole sequences a rank from which on a plan without groups is not compared with baselines."""
FEW = 4096
"""Shorter blocks are tried while they make at most this many groups. The plan of a batch of more sequences is compared
with baselines only if it is not good enough: evaluating it would take as long as planning."""
BISECTIONS = 4
"""Makespans that reservations aim at, after the first one."""
ORDERS, LOOKS = 24, 100_000
"""Orders in which groups are reserved, and looks at gaps in all of them, half a microsecond each. Where this ends the
first order, as of a thousand groups that take most ranks each for half of the time, nothing is reserved."""
STEPS_UP = 5
"""In the next order, a group moves forward by 1 to this many places, in turn."""
LITTLE = 1.01
"""Reservations end when the traffic is at most this many times the traffic without growth."""
LOW = 1.5
"""Gaps up to this many times the shortest sequence are filled (1 to 3 were tried: all keep to the target). Without it,
github on 16,384 ranks ends at 1.019 instead of 1.009 of its bound."""
ROUND_RATIO = 0.5
"""Whole sequences are dealt in one round if their times differ by less. 0.8 is no better and 2.3 times slower."""
MORE_ABLE = 1.15
"""On ranks that differ in capacity, a round ends where this many times as many ranks can hold the next sequence."""

# What is tried in a pipeline.
LEVELS = 32
"""Longest blocks, in geometric steps from the target down to a 64th of a pack of whole sequences."""
WHOLE_SLOTS_IN_PIPELINE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""``WHOLE_SLOTS`` of the best longest blocks, where blocks cannot be replaced by reservations."""
REFINED, AIMS = 3, 3
"""Longest blocks that are tried with each of them, and makespans to aim at for each of them."""
LEAST_TRIALS, SEQUENCES_TRIED = 16, 150_000
"""Trials for each size of packs: at least so many, and so many times sequences."""
TIMED, SIMULATED = 8, 12_000
"""Trials of a pipeline whose steps are simulated (where the caller can), and the forwards and backwards in all of them.
A pipeline's makespan is an estimate."""
MIN_PACK = 8192
"""Tokens; packs of whole sequences are halved down to this size."""

# How a sequence's number of ranks is found.
GRID = 192
"""Degrees tried, in geometric steps: some 2.5 % apart on 100 ranks."""
AT_ONCE = 96
"""Sequences for which the grid is computed at once: its arrays stay in the processor's cache."""

# On ranks that differ.
WIDE, MULTIPLE = 16, 8
"""Groups of at least ``WIDE`` ranks have a ``MULTIPLE`` of ranks where grids are known, so that they have shapes."""
MANY = 32
"""Tokens of a member from which on its time is taken to be proportional to its share, before shares are rounded."""
SHORT = 1e-9
"""Least time asked for a group, over the longest one: on a slot that is free too late it takes all ranks."""
