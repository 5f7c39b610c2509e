"""memengine: a training engine in which memory is a config option."""

__version__ = '0.1.0'
