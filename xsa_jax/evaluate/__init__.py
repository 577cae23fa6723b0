"""Evaluation of a trained model on held-out text: loss by position and context length, similarity analysis, and samples."""
