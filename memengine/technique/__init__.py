"""One description per technique: its settings, how it is applied, what it goes with, its row.

The config's check, ``memengine techniques``, the hook, the order of application, refusals of pairs,
the tables of README and docs and the test of all pairs follow from it. A description stands in the
technique's own file; :func:`techniques` finds those in the rooms of this package, of installed
packages (entry points of the group ``memengine.techniques``) and those that were handed to
:func:`register`.
"""

from memengine.technique.description import Technique, in_order, register, techniques, with_settings
from memengine.technique.handle import Handle, PausableHandle, Report, StepInfo
from memengine.technique.settings import Settings, in_words, is_of, setting, settings_of

__all__ = [
    'Handle',
    'PausableHandle',
    'Report',
    'Settings',
    'StepInfo',
    'Technique',
    'in_order',
    'in_words',
    'is_of',
    'register',
    'setting',
    'settings_of',
    'techniques',
    'with_settings',
]
