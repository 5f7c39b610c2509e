"""Algorithms and what they are made of."""

from memengine.models.algorithms.base import Algorithm
from memengine.models.algorithms.classifier import Classifier
from memengine.models.algorithms.clip import CLIP, SigLIP
from memengine.models.algorithms.coca import CoCa
from memengine.models.algorithms.contrastive import SimCLR, SupCon
from memengine.models.algorithms.detector import TorchvisionDetector
from memengine.models.algorithms.dino import DINO
from memengine.models.algorithms.language_model import CausalLanguageModel
from memengine.models.algorithms.selfcon import SelfCon
from memengine.models.backbones.image_libraries import (
    OpenClipImage,
    TorchvisionBackbone,
    TransformersImage,
)
from memengine.models.backbones.pooled_backbone import PooledBackbone
from memengine.models.backbones.text_libraries import OpenClipText, TransformersText
from memengine.models.backbones.text_transformer import TextTransformer
from memengine.models.backbones.timm_backbone import TimmBackbone
from memengine.models.heads.caption_head import CaptionHead
from memengine.models.heads.dino_head import DINOHead
from memengine.models.heads.projection_head import ProjectionHead
from memengine.models.mixed_batches import MixedBatches
from memengine.techniques.slices.slicing import Slice

__all__ = [
    'CLIP',
    'DINO',
    'Algorithm',
    'CaptionHead',
    'CausalLanguageModel',
    'Classifier',
    'CoCa',
    'DINOHead',
    'MixedBatches',
    'OpenClipImage',
    'OpenClipText',
    'PooledBackbone',
    'ProjectionHead',
    'SelfCon',
    'SigLIP',
    'SimCLR',
    'Slice',
    'SupCon',
    'TextTransformer',
    'TimmBackbone',
    'TorchvisionBackbone',
    'TorchvisionDetector',
    'TransformersImage',
    'TransformersText',
]
