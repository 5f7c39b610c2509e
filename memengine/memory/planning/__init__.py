"""Which techniques, and how much of each: the least time whose memory is within a budget."""

from memengine.memory.planning.cost import Cost, Rates, rates_of
from memengine.memory.planning.largest import largest
from memengine.memory.planning.plans import Found, Knob, Plan, Tried, has_both
from memengine.memory.planning.search import leanest, search

__all__ = [
    'Cost',
    'Found',
    'Knob',
    'Plan',
    'Rates',
    'Tried',
    'has_both',
    'largest',
    'leanest',
    'rates_of',
    'search',
]
