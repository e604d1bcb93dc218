"""Batches: their life cycle, their directories and manifests, and reading them, also while others have the queue or reader.

It may import `disk` and `formats`.
"""
