"""Activation offload: what is saved for backward waits in host memory (on a CPU, in files).

Add this file to ``_base_``, or set ``activation_offload=True`` on the command line.
"""

activation_offload = dict(store='auto', look_ahead=2)
