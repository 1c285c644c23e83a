"""Readers of files: arrays and tables of logits, probabilities or features, each as `Contents`."""
