"""What a model is worth: metrics for validation."""

from memengine.evaluation.knn import weighted_knn
from memengine.evaluation.knn_metric import KNNMetric

__all__ = ['KNNMetric', 'weighted_knn']
