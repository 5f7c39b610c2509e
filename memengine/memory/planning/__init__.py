"""Which techniques, and how much of each: the least time whose memory is within a budget."""

from memengine.memory.planning.cost import Cost, Rates, parse_bytes, rates_of
from memengine.memory.planning.search import Found, Knob, Plan, Tried, search

__all__ = [
    'Cost',
    'Found',
    'Knob',
    'Plan',
    'Rates',
    'Tried',
    'parse_bytes',
    'rates_of',
    'search',
]
