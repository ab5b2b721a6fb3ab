"""What the graft costs: each case beside its rival in one process, alternating, as ratios of medians.

A time alone says how fast a machine is; a ratio, taken in turns, says what the code costs.
"""
