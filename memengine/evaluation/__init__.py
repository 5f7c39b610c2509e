"""What a model is worth: metrics for validation."""

from memengine.evaluation.accuracy import AccuracyMetric
from memengine.evaluation.coco import CocoMetric
from memengine.evaluation.image_text import RetrievalMetric, ZeroShotMetric
from memengine.evaluation.knn import weighted_knn
from memengine.evaluation.knn_metric import KNNMetric
from memengine.evaluation.perplexity import PerplexityMetric

__all__ = [
    'AccuracyMetric',
    'CocoMetric',
    'KNNMetric',
    'PerplexityMetric',
    'RetrievalMetric',
    'ZeroShotMetric',
    'weighted_knn',
]
