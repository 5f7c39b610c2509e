"""Packages; all else is in setup.cfg. The configs lie beside the package and are shipped in it."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=['memengine', 'memengine.*']), 'memengine.configs'],
    package_dir={'memengine.configs': 'configs'},
    package_data={
        'memengine': ['py.typed'],
        'memengine.techniques.codecs.kernels': ['*.c'],
        'memengine.configs': ['**/*.py'],
    },
)
