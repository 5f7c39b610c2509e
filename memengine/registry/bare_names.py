"""memengine's types by their bare names in MMEngine's own registries, once this is imported.

``custom_imports=dict(imports=['memengine.registry.bare_names'])`` in a config of MMEngine's Runner,
or of a library with a scope of its own (``default_scope='mmpretrain'``), and ``type='DINO'`` is
found where ``type='memengine.DINO'`` was. ``import memengine`` alone changes no registry: it may
stand in any script, before or after MMEngine.

A name that MMEngine or somebody else has registered there keeps its meaning, and so do those of a
library's own registries, which are asked first. A module that registers names in MMEngine's
registries stands before this one in ``imports``.
"""

import mmengine.runner  # noqa: F401  registers all that is MMEngine's
from mmengine.registry import Registry

from memengine import registry

__all__: list[str] = []

for _ours in [each for each in vars(registry).values() if isinstance(each, Registry)]:
    _ours.import_from_location()
    for _name in _ours.module_dict.keys() - _ours.root.module_dict.keys():
        _ours.root.register_module(name=_name, module=_ours.module_dict[_name])
