"""BatchNorm over the samples of all ranks, on any backend; in one process it does nothing.

Add this file to ``_base_``, or set ``sync_bn=torch`` on the command line.
"""

sync_bn = 'torch'
