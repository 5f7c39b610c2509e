"""Algorithms and what they are made of."""

from memengine.models.algorithms.base import Algorithm
from memengine.models.algorithms.dino import DINO
from memengine.models.backbones.timm_backbone import TimmBackbone
from memengine.models.heads.dino_head import DINOHead

__all__ = ['DINO', 'Algorithm', 'DINOHead', 'TimmBackbone']
