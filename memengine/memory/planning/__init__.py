"""Which techniques, and how much of each: the least time whose memory is within a budget."""

from memengine.memory.planning.cost import FITS, Cost, Rates, parse_bytes, parse_fit, rates_of
from memengine.memory.planning.largest import largest
from memengine.memory.planning.search import Found, Knob, Plan, Tried, leanest, search

__all__ = [
    'FITS',
    'Cost',
    'Found',
    'Knob',
    'Plan',
    'Rates',
    'Tried',
    'largest',
    'leanest',
    'parse_bytes',
    'parse_fit',
    'rates_of',
    'search',
]
