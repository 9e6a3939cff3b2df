"""Predictions of the time, memory and traffic of training with KFC on many ranks."""
