"""Objectives on embeddings; plain torch."""

from memengine.losses.clip import ClipLoss
from memengine.losses.dino import DINOLoss
from memengine.losses.gather import Gather
from memengine.losses.koleo import KoLeoLoss, koleo_loss
from memengine.losses.ntxent import NTXentLoss
from memengine.losses.selfcon import ConLoss
from memengine.losses.siglip import SigLipLoss
from memengine.losses.supcon import SupConLoss

__all__ = [
    'ClipLoss',
    'ConLoss',
    'DINOLoss',
    'Gather',
    'KoLeoLoss',
    'NTXentLoss',
    'SigLipLoss',
    'SupConLoss',
    'koleo_loss',
]
