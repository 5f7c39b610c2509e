"""The one place for what torch keeps private, or names differently from version to version.

Everything here was tried on torch 2.6.0, 2.14.1 and 2.15.0 by ``tests/test_torch_private.py``,
which says by name what another torch has changed. Where nothing else is said, a part that is gone
is an ``ImportError`` or ``AttributeError`` in here. What hot paths call is torch's own function,
bound to a name, without a wrapper around it.
"""
