"""What a forward keeps as it is, computes again or codes is replayed in later ones.

A forward notes it, in the order of saving (``plan.py``). In later ones (``following.py``) what
stays is let pass at once, and what is computed again is let go at once, where the graph gives the
same answers as it did; no operation is looked up for either: to keep a tensor, or to compute its
very bits again, is right whatever it is for. A lossy code has to be known to serve: what is coded
waits, in each forward anew, until its module ends and the graph shows its node. If that is of the
class that it was, and needs the same of the same field, it is coded as it was (``coded_again.py``).
What differs from the plan drops it. What cannot be seen to differ costs at most bytes, or has the
code of one rule where another would be nearer by now, until the next forward that follows no plan.
"""

from memengine.techniques.compression.replay.coded_again import CodedAgain, CodedMemory
from memengine.techniques.compression.replay.following import ForwardPlans, Replay
from memengine.techniques.compression.replay.plan import HeldWhole

__all__ = ['CodedAgain', 'CodedMemory', 'ForwardPlans', 'HeldWhole', 'Replay']
